"""CUDA for tests on machines without a GPU: the project's worker runs completely, on tensors that have a device, a type
and a shape but no content (torch's `FakeTensorMode`).

What is fake: the driver (`tests.nvml_double`), everything of `torch.cuda` that would ask it (`gpus`), the device guard
that autograd wants (`guard.cpp`), the weights' values, and every answer that would come from the GPU (a loss is 1.0, a
flag is unset).

What is real: the command line, the plan, the worker's environment, and every line of the worker from its arguments to
the published model: what it asks of torch, transformers, PEFT and accelerate, on which device, in which type, and where
it waits for the GPU (`waits`).

What only a GPU can show: numbers, kernels, streams, speed, memory, NCCL. That is `tests/gpu` and `make accept-gpu`.

`worker` drives runs; `guard.py` compiles the guard (4 s, kept in the tests' cache). It needs a torch that was built
without CUDA.
"""
