"""`python -m sft_play.doctor`: the same report without the configuration's packages, for an environment that is badly broken."""

import sys

from sft_play.doctor import examine, report
from sft_play.doctor.checks import Context

if __name__ == "__main__":
    sys.exit(report(examine(Context(model_name=None)), as_json="JSON=1" in sys.argv[1:]))
