"""The table of rules in docs/doctor.md, generated from `pipelinerl.doctor`.

python -m deploy.tools.doctor_reference                   # print it
python -m deploy.tools.doctor_reference docs/doctor.md    # replace the text between the table's two marks
"""

from __future__ import annotations

from deploy.tools.generated import GeneratedPart, row
from pipelinerl.doctor import lessons
from pipelinerl.doctor.findings import rules_of
from pipelinerl.doctor.recipes import ADOPTED, RECIPE_RULES
from pipelinerl.doctor.runs import FIGURE_RULES, losses
from pipelinerl.doctor.settings import SETTINGS_RULES

_KINDS = (("a recipe", RECIPE_RULES), ("settings, before and after a run", SETTINGS_RULES), ("lost data", (losses,)),
          ("lengths, answers, rewards", lessons.RULES), ("numerics, policy, speed", FIGURE_RULES))  # fmt: skip


def rules() -> str:
    """Return a table with a row for each kind of rules."""
    checked = "<br>".join(f"[`{id_}`]({docs}): {meaning}" for id_, (_, meaning, docs) in ADOPTED.items())
    rows = [row(("what `validate` finds", checked))]
    for kind, families in _KINDS:
        found = rules_of(*families).items()
        told = (f"[`{id_}`]({page}): {meaning}: {threshold}" for id_, (page, meaning, threshold) in found)
        rows.append(row((kind, "<br>".join(told))))
    return "\n".join(["| rules about | id: meaning: threshold |\n|---|---|", *rows])


PART = GeneratedPart("rules", "python -m deploy.tools.doctor_reference docs/doctor.md", rules)

if __name__ == "__main__":
    PART.main()
