"""`easyrl agent serve`: try an agent before it is trained."""

from typing import Annotated

from typer import Option

from easyrl.cli import common


@common.command
def serve(
    *,
    config: common.ConfigFile = None,
    model: common.Model = None,
    infer_devices: common.InferDevices = None,
    port: Annotated[int, Option(help="On this machine alone; 0: a free one.")] = 8000,
    words: common.Words = None,
) -> None:
    """Serve the OpenAI-compatible endpoint that agents get in a run (docs/agents.md)."""
    from easyrl.config import load_config, options_by_key
    from easyrl.formatting import require

    require("agents", "easyrl agent serve")
    from easyrl.evaluation.serve import serve
    from easyrl.runtime.resume import settings_to_evaluate

    given = options_by_key(locals())
    serve(load_config(config, settings_to_evaluate(given, config) | given, words), port)
