"""Train on fifteen conversations with each of many chat templates, and judge tokens and masks.

python -m benchmarks.chat_templates DIR OUT.json [--template TEXT] [--conversation TEXT] [--reasoning MODE]

DIR holds published templates as NAME.jinja, such as `vendor/llama.cpp/models/templates` of the source package of
llama-cpp-python. Each conversation is read, rendered, tokenized and masked as for training, with a small tokenizer that
has the template's special tokens, and judged by `judge.py`. Prints the faults and a summary, and writes the verdicts as
JSON. Exits with status 1 if there is a fault. Takes about two minutes.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from benchmarks.chat_templates.conversations import CONVERSATIONS
from benchmarks.chat_templates.measure import Verdict, measure, templates_in
from benchmarks.commit import commit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.chat_templates", description="Judge tokens and masks of many chat templates."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the templates")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the JSON file to write")
    parser.add_argument("--template", default="", help="only the templates whose name contains this")
    parser.add_argument("--conversation", default="", help="only the conversations whose name contains this")
    parser.add_argument("--reasoning", default="refuse", choices=["refuse", "drop", "inline"])
    given = parser.parse_args(arguments)
    names = [name for name in CONVERSATIONS if given.conversation in name]
    verdicts = list[Verdict]()
    for template in templates_in(given.folder, given.template):
        found = measure(template, names, given.reasoning)
        verdicts += found
        for verdict in found:
            if verdict.kind == "FAULT":
                print(f"{verdict.template} | {verdict.conversation} | {verdict.text}", flush=True)
    table = [[verdict.template, verdict.conversation, verdict.text] for verdict in verdicts]
    kinds = Counter(verdict.kind for verdict in verdicts)
    head = {"commit": commit(), "reasoning": given.reasoning, "verdicts": dict(sorted(kinds.items()))}
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in table)
    given.out.write_text(f'{json.dumps(head)[:-1]}, "table": [\n{rows}\n]}}\n')
    templates = len({verdict.template for verdict in verdicts})
    print(f"{templates} templates, {len(names)} conversations: {dict(sorted(kinds.items()))}")
    return int(kinds["FAULT"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
