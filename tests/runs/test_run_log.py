"""The log file of a run has the lines of a terminal with their times, and a run does not depend on it."""

import logging
import re
import threading
import time
from errno import ENOSPC

from rptrain.runs.folder.run_log import FILE, RunLog
from rptrain.runs.records.line_file import LineFile

from .. import run_tools as tools

LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)\n", re.MULTILINE)


def lines(folder):
    text = (folder / FILE).read_text()
    found = LINE.findall(text)
    assert len(found) == len(text.splitlines()), "a line has no time"
    return found


def test_what_was_said_before_the_folder_existed_and_warnings_are_in_it(tmp_path, capsys):
    log = logging.getLogger("rptrain.data.loader")
    with RunLog() as run_log:
        run_log.write("first")
        log.warning("a file %s", "is odd")
        assert not (tmp_path / FILE).exists()
        run_log.open(tmp_path)
        run_log.write("two\nlines\x1b[31m")
    log.warning("after the run")
    with RunLog() as run_log:
        run_log.open(tmp_path)
        run_log.write("resumed")
    assert lines(tmp_path) == ["first", "a file is odd", "two", "lines␛[31m", "resumed"]


def test_a_warning_is_shown_once_as_without_a_log(tmp_path, monkeypatch):
    """By Python's handler of last resort, which another handler turns off."""
    own, root = logging.NullHandler(), logging.getLogger("rptrain")
    shown = list[str]()
    monkeypatch.setattr(logging.lastResort, "emit", lambda record: shown.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with RunLog():
        logging.getLogger("rptrain.train").warning("once")
        monkeypatch.setattr(root, "handlers", [*root.handlers, own])
        logging.getLogger("rptrain.train").warning("by the other handler")
    assert shown == ["once"]


def test_a_full_disk_is_noted_once_and_later_lines_are_whole(tmp_path, caplog):
    with RunLog() as run_log:
        run_log.open(tmp_path)
        run_log.write("before")
        with tools.room_for(40):
            run_log.write("lost " * 20)
            run_log.write("lost " * 20)
        run_log.write("after")
    assert lines(tmp_path) == ["before", "after"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / FILE} cannot be written: File too large. The run continues without it"
    ]


def test_a_deleted_file_is_noted_once(tmp_path, caplog):
    with RunLog() as run_log:
        run_log.open(tmp_path)
        (tmp_path / FILE).unlink()
        run_log.write("lost")
        run_log.write("lost")
    noted = [record.getMessage() for record in caplog.records]
    assert noted == [f"{tmp_path / FILE} cannot be written: it was deleted. The run continues without it"]


def test_a_failure_to_write_does_not_wait_for_a_warning_of_another_thread(tmp_path, monkeypatch):
    """Logging holds the lock of a handler while it writes a record, which waits for the line that is written."""
    log, failing = logging.getLogger("rptrain.train"), threading.Event()

    def fail(file, line):
        failing.set()
        time.sleep(0.05)  # meanwhile it waits for this thread
        raise OSError(ENOSPC, "No space left on device")

    def warn():
        failing.wait()
        log.warning("of another thread")

    monkeypatch.setattr(LineFile, "append", fail)
    warning = threading.Thread(target=warn, daemon=True)
    with RunLog() as run_log:
        run_log.open(tmp_path)
        warning.start()
        writing = threading.Thread(target=run_log.write, args=("a line",), daemon=True)
        writing.start()
        writing.join(10)
        assert not writing.is_alive()
        warning.join(10)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path, caplog):
    (outside := tmp_path / "outside.log").write_text("mine")
    (run := tmp_path / "run").mkdir()
    (run / FILE).symlink_to(outside)
    with RunLog() as run_log:
        run_log.open(run)
        run_log.write("not there")
    assert outside.read_text() == "mine" and len(caplog.records) == 1
