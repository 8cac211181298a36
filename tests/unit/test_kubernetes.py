"""`make kubernetes`: what each kind of job is rendered to, from one plan, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_play.config.load import read_config
from sft_play.errors import UserError
from tests.conftest import Program
from tests.kubernetes_runs import KINDS, documents, documents_of, of_kind, pods, rendered

TOKEN_LIKE = "hf_" + "AbCdEfGhIjKlMnOpQrSt"
CLAIMS = ("KUBERNETES_CREATE_CLAIMS=true", "KUBERNETES_STORAGE_CLASS=nfs")


def container(template: Any) -> Any:
    [container] = template["spec"]["containers"]
    return container


def environment(template: Any) -> dict[str, Any]:
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container(template)["env"]
    }


def noted(words: tuple[str, ...], *parts: str) -> bool:
    """Return whether a note contains all `parts`."""
    return any(all(text in note for text in parts) for note in rendered(*words).notes)


def test_a_pytorchjob_has_a_master_and_workers_and_one_node_a_master_alone() -> None:
    spec = of_kind(documents("NUM_NODES=3"), "PyTorchJob")["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert [(role, replica["replicas"], replica["restartPolicy"]) for role, replica in replicas.items()] == [
        ("Master", 1, "ExitCode"),
        ("Worker", 2, "ExitCode"),
    ]
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": 604800,
    }, "backoffLimit would be no limit"
    never = of_kind(documents("KUBERNETES_MAX_RESTARTS=0", "HARDWARE=4xL40S"), "PyTorchJob")["spec"]
    assert never["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "Never" and never["nprocPerNode"] == "4"
    alone = of_kind(documents("NUM_NODES=1", "CONFIG=configs/l40s_single.yaml"), "PyTorchJob")["spec"][
        "pytorchReplicaSpecs"
    ]
    assert set(alone) == {"Master"} and container(alone["Master"]["template"])["args"][0] == "train"


def test_a_trainjob_has_a_separate_runtime() -> None:
    manifests = documents("KUBERNETES_KIND=trainjob")
    runtime, job = of_kind(manifests, "TrainingRuntime"), of_kind(manifests, "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 1}
    failure = runtime["spec"]["template"]["spec"]["failurePolicy"]
    assert failure["maxRestarts"] == 10 and failure["rules"][0]["action"] == "FailJobSet"
    assert "ttlSecondsAfterFinished" not in str(runtime), "the operator would make the JobSet again"


def test_a_job_finds_its_first_pod_by_a_service() -> None:
    manifests = documents("KUBERNETES_KIND=job")
    service, job = of_kind(manifests, "Service"), of_kind(manifests, "Job")
    template = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert environment(template)["MASTER_ADDR"] == "l40s-pair-0.l40s-pair"
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [1, 2, 3, 4, 5]
    assert [document["kind"] for document in documents("KUBERNETES_KIND=job", "NUM_NODES=1")] == ["ConfigMap", "Job"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_gets_only_what_it_needs(kind: str) -> None:
    toleration = {"key": "spot", "value": "true", "effect": "NoExecute", "tolerationSeconds": 60}
    result = rendered(
        f"KUBERNETES_KIND={kind}",
        "KUBERNETES_TRACKING_CLAIM=aim",
        "KUBERNETES_TOKEN_SECRET=hub",
        "KUBERNETES_PORT=23456",
        f"KUBERNETES_TOLERATIONS=[{toleration}]",
        "KUBERNETES_PULL_SECRET=registry",
        "KUBERNETES_QUEUE=team-a",
        "KUBERNETES_ENV={NCCL_DEBUG: INFO}",
    )
    manifests = documents_of(result.files)
    for template in pods(manifests):
        spec, pod, env = template["spec"], container(template), environment(template)
        assert pod["command"] == ["python", "-m", "sft_play.schedulers.entry"]
        assert pod["args"] == [
            "train-distributed",
            "CONFIG=/config/config.json",
            "RUN_NAME=l40s-pair",
            "NUM_GPUS=1",
            "NUM_NODES=2",
            "MASTER_PORT=23456",
            "LAUNCH_JOIN_SECONDS=600",
        ]
        assert pod["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}
        assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}
        assert env["MASTER_KEY"]["secretKeyRef"]["optional"]
        expected = {"RUNS_DIR": "/runs", "AIM_REPO": "/tracking", "NCCL_DEBUG": "INFO"}
        assert expected.items() <= env.items(), "a variable of one's own wins over ours"
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["volumeMounts"]}
        assert mounts == {
            "/config": "config",
            "/dev/shm": "shm",
            "/models": "models",
            "/runs": "runs",
            "/tracking": "tracking",
        }
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in spec["volumes"]
        assert {"name": "tracking", "persistentVolumeClaim": {"claimName": "aim"}} in spec["volumes"]
        assert pod["ports"][0]["containerPort"] == 23456 and spec["terminationGracePeriodSeconds"] >= 120
        assert spec["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
        assert spec["tolerations"] == [toleration] and spec["imagePullSecrets"] == [{"name": "registry"}]
    job = of_kind(manifests, {"pytorchjob": "PyTorchJob", "trainjob": "TrainJob", "job": "Job"}[kind])
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"


def test_the_configuration_in_the_map_is_the_resolved_one_and_is_read_back(tmp_path: Path) -> None:
    result = rendered("TRAIN_LEARNING_RATE=3e-5", "KUBERNETES_ENV={NCCL_DEBUG: INFO, A_B: '1'}")
    path = tmp_path / "config.json"
    files = of_kind(documents_of(result.files), "ConfigMap")
    assert files["immutable"], "an earlier job reads it when its pods start"
    path.write_text(files["data"]["config.json"])
    again = read_config(path, of_run=False)
    origins = json.loads(files["data"]["config.json"])["origins"]
    assert origins.keys() >= {"train.learning_rate", "model.name"} and "default" not in origins.values()
    assert str(Path.cwd()) not in files["data"]["config.json"]
    assert again.config.train.learning_rate == 3e-5 and dict(again.config.kubernetes.env) == {
        "NCCL_DEBUG": "INFO",
        "A_B": "1",
    }
    assert again.typed("train.global_batch_size") and not again.typed("train.batch_size")


def test_pods_plan_again_for_the_network_of_the_plan(tmp_path: Path) -> None:
    """They know their configuration only, and without a network's speed `auto` shards nothing over it."""
    model = ("CONFIG=configs/run_bnb.yaml", "MODEL_NAME=meta-llama/Llama-3.1-8B-Instruct", "TUNING_MODE=full")
    result = rendered(*model, "NUM_NODES=2", "HARDWARE=8xL40S@400Gbit")
    assert (result.spec.plan.strategy, result.spec.plan.num_nodes) == ("fsdp2", 2)
    path = tmp_path / "config.json"
    path.write_text(of_kind(documents_of(result.files), "ConfigMap")["data"]["config.json"])
    assert read_config(path, of_run=False).config.launch.network == "400Gbit"


def test_a_deepspeed_json_is_rendered_verbatim() -> None:
    result = rendered("DEEPSPEED_CONFIG=deepspeed/zero2.json", "CONFIG=configs/l40s_single.yaml")
    assert (
        of_kind(documents_of(result.files), "ConfigMap")["data"]["deepspeed.json"]
        == Path("deepspeed/zero2.json").read_text()
    )
    assert result.spec.words[:4] == [
        "train-deepspeed",
        "CONFIG=/config/config.json",
        "RUN_NAME=l40s-single",
        "DEEPSPEED_CONFIG=/config/deepspeed.json",
    ]


def test_planned_host_memory_must_fit_the_pod() -> None:
    offloaded = ("DEEPSPEED_CONFIG=deepspeed/zero3_offload.json", "TUNING_MODE=full")
    words = ("CONFIG=configs/l40s_single.yaml", "HARDWARE=2xL40S", "NUM_NODES=1", *offloaded)
    [pod] = pods(documents_of(rendered(*words).files))
    limits = container(pod)["resources"]["limits"]
    assert limits == {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": "2"}, "8 cores and 64Gi for each GPU"
    assert noted((*words, "KUBERNETES_MEMORY=20Gi"), "a pod's memory", "kubernetes.memory is 20Gi, /dev/shm included")
    assert not noted((*words, "KUBERNETES_MEMORY=900Gi"), "a pod's memory")
    sharded = ("CONFIG=configs/l40s_single.yaml", "HARDWARE=8xL40S", "NUM_NODES=1", "TUNING_MODE=full")
    sharded = (*sharded, "LAUNCH_STRATEGY=fsdp2", "KUBERNETES_MEMORY=64Gi")
    shared = documents_of(rendered(*words, "KUBERNETES_SHM=100Gi").files)
    assert any(volume.get("emptyDir", {}).get("sizeLimit") == "100Gi" for volume in pods(shared)[0]["spec"]["volumes"])
    assert noted(sharded, "a pod's memory"), "each process loads all weights in fp32"


def test_data_on_a_claim_need_not_be_on_this_machine(in_process: Program) -> None:
    words = ("CONFIG=configs/quickstart.yaml", "HARDWARE=L40S", "DATA_VAL_PATH=null", "TRAIN_EVAL_STRATEGY=no")
    mounted, other = (
        in_process("kubernetes", *words, f"DATA_TRAIN_PATH={folder}/rows.jsonl") for folder in ("/models", "/elsewhere")
    )
    assert mounted.code == other.code == 0, mounted.err + other.err
    assert "not on this machine" not in mounted.err and "copy these there" not in mounted.err
    assert "`/elsewhere/rows.jsonl` are not on this machine" in other.err


def test_claims_are_in_a_separate_file_and_allow_many_pods() -> None:
    files = rendered(*CLAIMS, "KUBERNETES_TRACKING_CLAIM=aim").files
    claims = [
        (claim["metadata"]["name"], claim["spec"]["accessModes"]) for claim in yaml.safe_load_all(files["claims.yaml"])
    ]
    assert claims == [("models", ["ReadWriteMany"]), ("runs", ["ReadWriteMany"]), ("aim", ["ReadWriteMany"])]
    assert "PersistentVolumeClaim" not in files["pytorchjob.yaml"]
    assert noted((*CLAIMS, "KUBERNETES_ACCESS_MODE=ReadWriteOnce"), "must be on one node")


def test_one_claim_may_hold_models_and_runs() -> None:
    manifests = documents(*CLAIMS, "NUM_NODES=1", "KUBERNETES_RUNS_CLAIM=models")
    assert of_kind(manifests, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    [template] = pods(manifests)
    assert {mount.get("subPath") for mount in container(template)["volumeMounts"]} == {None, "models", "runs"}


def test_infiniband_is_rendered_only_on_request() -> None:
    words = (
        "KUBERNETES_INFINIBAND=true",
        "KUBERNETES_HCA=mlx5",
        "KUBERNETES_RDMA_RESOURCE=rdma/hca",
        "KUBERNETES_RDMA_COUNT=4",
    )
    assert "NCCL_IB_DISABLE" not in environment(pods(documents("HARDWARE=H100@400Gbit"))[0])
    template = pods(documents(*words))[0]
    assert {"NCCL_IB_HCA": "mlx5", "NCCL_IB_DISABLE": "0"}.items() <= environment(template).items()
    assert container(template)["resources"]["limits"]["rdma/hca"] == "4"
    assert container(template)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_pods_go_to_the_nodes_that_are_asked_for() -> None:
    for pod in pods(documents("KUBERNETES_NODE_SELECTOR={zone: x}")):
        assert pod["spec"]["nodeSelector"] == {"zone": "x"}
    assert all("nodeSelector" not in pod["spec"] for pod in pods(documents()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("KUBERNETES_CREATE_CLAIMS=true",),
            "KUBERNETES_CREATE_CLAIMS=true: `kubernetes.create_claims` is `true`, and",
        ),
        (("KUBERNETES_HCA=mlx5",), "which needs `kubernetes.infiniband: true`"),
        (
            ("KUBERNETES_MEMORY=64",),
            "`kubernetes.memory` is `64`; expected a quantity such as `64Gi`; a number alone is in bytes",
        ),
        (("KUBERNETES_STORAGE_SIZE=500GB",), "hint: write `500G`"),
        (("KUBERNETES_SHM=16",), "`kubernetes.shm` is `16`; expected a quantity such as `64Gi`"),
        (
            ("KUBERNETES_SHM=64Gi",),
            "KUBERNETES_SHM=64Gi: `kubernetes.shm` is 64Gi, which uses all of a pod's memory (64Gi)",
        ),
        (("HARDWARE=A100+L40S@10Gbit",), "different GPUs (A100, L40S), but a job has one template for all of them"),
        ((f"KUBERNETES_ENV={{WHERE: {TOKEN_LIKE}}}",), "looks like an access token"),
        (("KUBERNETES_ENV={MASTER_ADDR: x}",), "`MASTER_ADDR`, which the manifests or the operator set"),
        (("RUN_NAME=My_Run",), "`RUN_NAME` is `My_Run`"),
        (("KUBERNETES_RUNS_CLAIM=null",), "`kubernetes.runs_claim` is null, and pods keep nothing without a claim"),
    ],
)
def test_manifests_that_a_cluster_would_refuse_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        rendered(*words)
    assert message in caught.value.render()


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN_LIKE)
    files = rendered(f"KUBERNETES_KIND={kind}", "KUBERNETES_TOKEN_SECRET=hub").files
    assert TOKEN_LIKE not in "".join(files.values())
