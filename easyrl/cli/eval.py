"""`easyrl eval`: evaluate."""

from pathlib import Path
from typing import Annotated

from typer import Option

from easyrl.cli import common


@common.command
def evaluate(
    *,
    config: common.ConfigFile = None,
    model: common.Model = None,
    base: Annotated[
        str | None, Option(metavar="MODEL", help="The model that an adapter belongs to.")
    ] = None,
    dataset: Annotated[str | None, Option(help="A preset, file, folder or hub id.")] = None,
    reward: common.Reward = None,
    environment: common.Environment = None,
    agent: common.Agent = None,
    num_samples: Annotated[int | None, Option(help="Completions per problem.")] = None,
    engine: Annotated[str | None, Option(help="vllm or embedded.")] = None,
    infer_devices: common.InferDevices = None,
    ray_address: common.RayAddress = None,
    output: Annotated[
        str | None, Option(metavar="DIR", help="Folder of the results; a stopped one continues.")
    ] = None,
    seed: common.Seed = None,
    compare: Annotated[
        Path | None, Option(metavar="EVAL", help="Compare with this evaluation (its folder).")
    ] = None,
    no_live: common.NoLive = False,
    words: common.Words = None,
) -> int:
    """Evaluate a model: accuracy with its standard error, pass@k."""
    from easyrl.config import options_by_key
    from easyrl.evaluation.command import evaluate
    from easyrl.evaluation.view import EvalView
    from easyrl.observe.lines import print_end
    from easyrl.runtime.resume import load_to_evaluate

    given = options_by_key(
        model=model,
        dataset=dataset,
        reward=reward,
        environment=environment,
        agent=agent,
        num_samples=num_samples,
        engine=engine,
        infer_devices=infer_devices,
        ray_address=ray_address,
        output=output,
        seed=seed,
    )
    resolved = load_to_evaluate(config, given, words)
    end = evaluate(resolved, EvalView(live=not no_live), base=base, other=compare)
    if end.message:
        print_end(end.exit_code, end.message)
    return end.exit_code
