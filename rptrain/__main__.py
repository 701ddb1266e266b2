"""`python -m rptrain`."""

import sys
from pathlib import Path

# In a checkout `kernels` and `models` stand beside this package; with that folder on the path, as `python -m`
# puts it there, libraries that look for a PyPI package of such a name find ours. Installed, they lie inside.
HERE = Path(__file__).resolve().parent
if not (HERE / "kernels").is_dir():
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE.parent]
    sys.modules.pop("rptrain", None)  # the installed package knows where both folders are, this one may not

from rptrain.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
