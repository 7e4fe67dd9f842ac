"""Print docs/settings.md: `python docs/settings.py > docs/settings.md`."""

from easyrl.config import KEYS, SECTIONS, on_one_line, yaml_value
from easyrl.config.section import MAY_CHANGE
from easyrl.config.values import allowed_values


def settings_markdown() -> str:
    """Return a table of keys, defaults and meanings for each section."""
    allowed = allowed_values()
    lines = [
        "# Settings\n\nEvery key of a run. Set one as `section.key=value` on the command line, or",
        "in a YAML file given with `--config`; `easyrl config` prints such a file with every key.",
        "Keys with * may change when a run is resumed.",
    ]
    for name, section in SECTIONS.items():
        lines += ["", f"## {name}", "", on_one_line(section.__doc__), ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, field in section.model_fields.items():
            full_name = f"{name}.{key}"
            if full_name in KEYS:
                default = yaml_value(field.get_default(call_default_factory=True))
                meaning = on_one_line(field.description).replace("|", "\\|")
                star = "*" if MAY_CHANGE in field.metadata else ""
                values = f"*Values: {allowed[full_name]}.*"
                lines.append(f"| `{full_name}`{star} | `{default}` | {meaning} {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(settings_markdown())
