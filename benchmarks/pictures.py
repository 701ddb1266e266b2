"""The README's pictures, of made-up records: `python -m benchmarks.pictures` writes benchmarks/results/tui/*.svg."""

import asyncio
import os
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rptrain.tui.app import make_app
from tests.tui.conftest import Scripted, screen_text, until
from tests.tui.recorded import make_run

FOLDER = Path(__file__).parent / "results" / "tui"
SIZE = (110, 32)
CONFIG = """\
[model]
path = "llama-3.1-8b"

[[data.train]]
path = "chats.jsonl"

[train]
method = "full"
num_epochs = 2.0
micro_batch_size = 4
global_batch_size = 64

[optim]
learning_rate = 1e-5
warmup_steps = 0.03

[save]
save_steps = 200
save_total_limit = 2

[log]
run_name = "llama-3.1-8b-chats"
"""


async def take(name: str, keys: tuple[str, ...], awaited: str, look: str) -> None:
    app = make_app(helper=Scripted(), settings=Path("settings.toml"))
    app.theme = look
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "✓ fits" in screen_text(app))
        for key in keys:
            await pilot.press(key)
            await pilot.pause(1.0)
        await until(pilot, lambda: awaited in screen_text(app))
        await pilot.pause(1.0)
        svg = app.export_screenshot(title="rptrain", simplify=True)
    # Without the web fonts, whose addresses would be asked for by whoever looks at it.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(svg)


def main() -> None:
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("rptrain.toml").write_text(CONFIG)
        now = time.time()
        make_run(Path("runs"), "llama-3.1-8b", devices=2, began=now - 840)
        make_run(Path("runs"), "llama-3.1-8b-chats", steps=210, end="failed", alive=False, began=now - 9000)
        asyncio.run(take("new-run", (), "Where it is kept", "dark"))
        asyncio.run(take("run", ("f3", "enter"), "step 400: saved", "dark"))
        asyncio.run(take("runs", ("f3", "space", "down", "space"), "━ llama-3.1-8b-chats", "light"))
        asyncio.run(take("doctor", ("f4",), "synced", "light"))


if __name__ == "__main__":
    main()
