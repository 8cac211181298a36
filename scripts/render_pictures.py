"""Draw docs/pictures/*.svg: the real output of commands, as a terminal shows it.

`python -m scripts.render_pictures` runs the quickstart (some minutes) and a plan; `python -m scripts.render_pictures
plan` only the latter.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path("docs/pictures")
COMMANDS = {
    "plan": "make plan CONFIG=run_bnb HARDWARE=RTX4090 WHY=0",
    "quickstart": "make quickstart RUN_NAME=first",
}
COLUMNS = 140
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own frame, without its web font."""


def draw(name: str, command: str) -> None:
    """Run a command and write its picture. Raise `CalledProcessError` if it fails."""
    printed = subprocess.run(command.split(), check=True, text=True, stdout=subprocess.PIPE).stdout
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(printed.replace(str(Path.cwd()), "~/sft-play")))
    PICTURES.mkdir(exist_ok=True)
    console.save_svg(str(PICTURES / f"{name}.svg"), title="", code_format=FRAME, unique_id=name)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or COMMANDS:
        draw(chosen, COMMANDS[chosen])
