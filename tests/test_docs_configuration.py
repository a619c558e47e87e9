"""docs/configuration.md says what the settings are. After a change of spec.py: pytest --rewrite, and read the diff."""

from pathlib import Path

from headway.cli.reference import DERIVED, GROUPS, markdown
from headway.scheduler.keys import KEYS, dotted, group_of, variable
from headway.scheduler.spec import ModelSpec

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_the_document_is_current(rewrite: bool) -> None:
    if rewrite:
        DOCUMENT.write_text(markdown())
    assert DOCUMENT.read_text() == markdown()


def test_every_setting_is_there_and_has_a_meaning() -> None:
    text = markdown()
    for at, field in KEYS.items():
        if group_of(field) is None:
            assert f"`{variable(at)}`" in text, dotted(at)
            assert field.description, f"{dotted(at)} has no description in spec.py"
    assert {at[:-1] for at, field in KEYS.items() if group_of(field) is None} == {group for _, _, group in GROUPS}
    assert set(DERIVED) <= set(ModelSpec.model_fields)
