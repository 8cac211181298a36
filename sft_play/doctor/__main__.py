"""`python -m sft_play.doctor`: the same report without the configuration's packages, for an environment that is badly broken."""

import sys

from sft_play.doctor import report

if __name__ == "__main__":
    sys.exit(report(as_json="JSON=1" in sys.argv[1:]))
