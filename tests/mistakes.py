"""Mistakes as a user types them, and the files they are made with."""

import json
import shutil
from pathlib import Path

from easyrl.config import load_config, to_commented_yaml
from easyrl.model import checkpoint_files
from easyrl.model.files import fingerprint
from easyrl.runtime.run_folder import lock_folder
from runs import write_rows

TINY = Path(__file__).parent.parent / "easyrl" / "model" / "built_in" / "tiny"
REWARDS = """
def score(completions, **columns):
    return [0.0] * len(completions)

def one_for_all(completions, **columns):
    return 1.0

def truth(completions, **columns):
    return [float(each == right) for each, right in zip(completions, columns["ground_truth"])]

def text(completions, answer, **columns):
    return [float(each.strip() == right) for each, right in zip(completions, answer)]

def contains(completions, answer, **columns):
    return [float(right in each) for each, right in zip(completions, answer)]

def a_number(completions, **columns):
    return [float(2 in each) for each in completions]

def a_set(completions, **columns):
    return {0.0}
"""
CHAT = [{"role": "user", "content": "1+1="}]
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
"""The sizes of Qwen3-1.7B: 6.4 GiB in float32, and 25.6 GiB to train."""
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
}
"""The sizes of the text model of Qwen3.5-0.8B."""


def write_files(folder):
    texts = {
        "good.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
        "broken.jsonl": '{"prompt": "1+1="}\n{"prompt": \n',
        "other.jsonl": '{"question": "1+1=", "answer": "2"}\n',
        "long.jsonl": '{"prompt": "1+1=", "answer": "2"}\n\n'
        '{"prompt": "1+1+1+1+1=", "answer": "5"}\n',
        "half.jsonl": '{"prompt": "1+1= \\ud83d", "answer": "2"}\n',
        "r.py": REWARDS,
        "t.py": 'def f() -> int:\n    """Draw a card."""\n    return 1\n',
        "fails.py": "import math\n\nimport nothing_of_that_name\n",
        "syntax.yaml": "train:\n  iterations: [1\nmodel: {}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    write_rows(folder / "chat.jsonl", [{"prompt": CHAT, "answer": "2"}] * 2)
    for name in ("taken", "qwen", "evaluation", "samples"):
        (folder / name).mkdir()
    (folder / "taken" / "notes.txt").write_text("mine")
    (folder / "qwen" / "config.json").write_text(json.dumps(QWEN))
    for name in ("config.yaml", "settings.json"):
        (folder / "evaluation" / name).write_text("{}")
    sample = {"iteration": 1, "prompt_index": 0, "prompt": "1+1=", "completion": "2", "reward": 1.0}
    write_rows(folder / "samples" / "samples.jsonl", [sample])
    (folder / "samples" / "none").mkdir()
    (folder / "samples" / "none" / "samples.jsonl").touch()
    for name, change in (BROKEN_MODELS | OTHER_MODELS | REWARD_MODELS).items():
        shutil.copytree(TINY, folder / name)
        change(folder / name)
    shutil.copytree(TINY.parent / "tiny_guess", folder / "chunked")
    chunked = ["chunked_attention"] * 4  # which no engine of ours serves with several groups
    change_json("config.json", layer_types=chunked)(folder / "chunked")
    for name, states in RUNS.items():
        make_run(folder / name, states)
    locks.append(lock_folder(folder / "run_in_use"))


def make_run(folder, states, *words):
    (folder / "checkpoints").mkdir(parents=True)
    config = load_config(None, {"output.dir": str(folder)}, words)
    (folder / "config.yaml").write_text(to_commented_yaml(config))
    for version, special in states.items():
        state = {
            "num_iterations": version,
            "policy_version": version,
            "config": config.model_dump(mode="json"),
            "identity": {"model.path": fingerprint("tiny"), "data.dataset": None},
            "file_sizes": {},
        }
        write_checkpoint(folder, version, special if isinstance(special, str) else state | special)


def write_checkpoint(folder, version, state):
    """Write a checkpoint without weights. `state`: a damaged state file if it is a text."""
    text = state
    if not isinstance(state, str):
        content = {"format": 1, "sha256": {}, "state": state}
        own = checkpoint_files._content_sha256(content)
        text = json.dumps(content | {checkpoint_files.OWN_CHECKSUM: own})
    (folder / "checkpoints" / str(version)).mkdir(parents=True)
    (folder / "checkpoints" / str(version) / "state.json").write_text(text)


locks = []
"""Locks of run folders that seem to be in use."""
RUNS = {
    "run_without": {},
    "run_broken": {10: '{"format": 1', 20: ""},
    "run_whole": {10: {}},
    "run_in_use": {10: {}},
    "run_other_model": {10: {"identity": {"model.path": "another", "data.dataset": None}}},
}


def change_json(name, **values):
    def change(folder):
        content = json.loads((folder / name).read_text()) | values
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return change


def remove(*patterns):
    def change(folder):
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return change


def replace(name, content):
    return lambda folder: (folder / name).write_bytes(content) and None


ROPE = {"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
ROPE["original_max_position_embeddings"] = 512
OWN_CODE = {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}
NO_TOOLS = "{{ tools and raise_exception('no tools') }}{{ messages }}"
REFUSES = "{{ raise_exception('roles must alternate') }}"
BROKEN_MODELS = {
    "no_config": remove("config.json"),
    "no_weights": remove("*.safetensors"),
    "no_tokenizer": remove("token*"),
    "unknown_type": change_json("config.json", model_type="frobnicate"),
    "cut_off": replace("model.safetensors", (TINY / "model.safetensors").read_bytes()[:-1000]),
}
OTHER_MODELS = {
    "own_code": change_json("config.json", model_type="mine", auto_map=OWN_CODE),
    "longrope": change_json("config.json", rope_parameters=ROPE),
    "thinks": change_json(
        "tokenizer_config.json", chat_template="{{ enable_thinking }}{{ messages }}"
    ),
    "refuses": change_json("tokenizer_config.json", chat_template=REFUSES),
    "no_tools": change_json("tokenizer_config.json", chat_template=NO_TOOLS),
}


def reward_model(*lacking, num_labels=1, **values):
    labels = {str(label): f"LABEL_{label}" for label in range(num_labels)}

    def change(folder):
        values["architectures"] = ["LlamaForSequenceClassification"]
        change_json("config.json", id2label=labels, **values)(folder)
        remove(*lacking)(folder)

    return change


OWN_REWARD_CODE = {"AutoConfig": "c.C", "AutoModelForSequenceClassification": "m.M"}
REWARD_MODELS = {
    "one_label": reward_model(),
    "two_labels": reward_model(num_labels=2),
    "no_reward_tokenizer": reward_model("token*"),
    "own_reward_code": reward_model(model_type="mine", auto_map=OWN_REWARD_CODE),
}

NO_OUTPUT = "--no-live"
"""Takes the place of --output where the run folder must not be named (it changes nothing else)."""

# What is typed after `easyrl`, and the key, flag or line that the error names. FOLDER holds the
# files. Values that a key does not take are in test_config.
EXACT = "--reward exact_match --dataset FOLDER"
SUMS, LEGS = "--dataset reasoning_gym:chain_sum", "--dataset reasoning_gym:leg_counting"
PLAN = "grpo --dry-run --assume 8x80GiB"
MISTAKES = {
    # words, flags and the config file
    "grpo --seed=-1": "runtime.seed",
    "grpo --learning-rate 1": "train.learning_rate=VALUE",
    "grpo --dtype bfloat16": "did you mean model.dtype=VALUE?",
    "grpo --model FOLDER/qwenn": "/qwen?)",
    "grpo algorithm.loss_type=gspo": "algorithm.importance_sampling_level=sequence",
    "grpo algorithm.scale_rewards=false": "got false; use algorithm.scale_rewards=none",
    "grpo run_name=first": "in EasyRL: output.dir (--output; ",
    "grpo --config FOLDER/syntax.yaml": "syntax.yaml:3",
    "grpo data.max_prompt_length=1000": "data.max_prompt_length + rollout.max_completion_length",
    "grpo train.eval_every=5 data.num_held_out=0": "train.eval_every",
    "grpo train.compile=true runtime.deterministic=true": "train.compile",
    # LoRA
    "grpo model.lora.rank=4 model.lora.target_modules=[q_proj,c_attn]": "model.lora.target_modules",
    "grpo model.lora.rank=100000000": "model.lora.rank",
    # devices
    "grpo --infer-devices 0-3": "devices.infer",
    "grpo --train-devices cpu:3 train.updates_per_iteration=8": "devices.train",
    # the model
    "grpo --model nobody/nothing": "model.path",
    **{f"grpo --model FOLDER/{name}": "model.path" for name in BROKEN_MODELS},
    "grpo --model FOLDER/own_code": "model.trust_remote_code=true",
    "grpo --model FOLDER/longrope": "data.max_prompt_length + rollout.max_completion_length",
    # data
    "grpo --dataset none.jsonl": "data.dataset",
    "grpo eval.dataset=FOLDER/other.jsonl": "data.prompt_column=question",
    f"grpo {EXACT}/broken.jsonl": "broken.jsonl:2",
    f"grpo {EXACT}/long.jsonl data.max_prompt_length=6": "long.jsonl:3",
    f"grpo {EXACT}/chat.jsonl": "chat.jsonl:1",
    f"grpo {EXACT}/chat.jsonl --model FOLDER/refuses": "chat.jsonl:1",
    f"grpo {EXACT}/chat.jsonl --model FOLDER/refuses rollout.tools=FOLDER/t.py:f": "shows tools",
    f"grpo {EXACT}/chat.jsonl --model FOLDER/no_tools rollout.tools=FOLDER/t.py:f": "it: no tools",
    f"grpo {EXACT}/chat.jsonl --model FOLDER/thinks data.chat_template_kwargs={{x:\\ 1}}": (
        "data.chat_template_kwargs"
    ),
    f"grpo {EXACT}/good.jsonl data.chat_template={{{{x}}}}": "data.chat=true",
    f"grpo {EXACT}/half.jsonl": "half.jsonl:1",
    # rewards
    "grpo --dataset FOLDER/good.jsonl": "reward.functions",
    "grpo --reward exact_match --reward exact_match": "expected each name once",
    "grpo --reward exactmatch": "did you mean exact_match?",
    "grpo --reward FOLDER/r.py": "r.py:one_for_all or ",
    "grpo --reward FOLDER/fails.py:score": 'fails.py", line 3',
    "grpo --reward code --dataset FOLDER/good.jsonl": "tests",
    "grpo --reward FOLDER/r.py:truth --dataset FOLDER/good.jsonl": "'ground_truth'; the data",
    "grpo --reward FOLDER/r.py:one_for_all --dataset FOLDER/good.jsonl": "reward.functions",
    "grpo --reward FOLDER/r.py:text --dataset FOLDER/chat.jsonl": "read completion[0]['content']",
    # the ring, memory, the disk
    "grpo rollout.num_generations=100000 train.prompts_per_iteration=4000": "rollout.ring_slots",
    **{
        f"{command} train.keep_checkpoints=100000000": "train.keep_checkpoints"
        for command in ("grpo", "grpo --dry-run")
    },
    "grpo --output FOLDER/taken": "--output",
    # resuming
    "grpo --no-live --resume FOLDER/nowhere": "--resume",
    "grpo --no-live --resume FOLDER/run_without": "train.save_every",
    "grpo --no-live --resume FOLDER/run_broken": "checkpoints/20",
    "grpo --no-live --resume FOLDER/run_in_use": "output.dir",
    "grpo --no-live --resume FOLDER/run_whole algorithm.beta=0.1": "algorithm.beta",
    "grpo --no-live --resume FOLDER/run_other_model": "model.path",
    "grpo --no-live --resume FOLDER/run_whole --iterations 9": "train.iterations",
    "grpo --resume FOLDER/run_whole --output elsewhere": "--output",
    "grpo --resume FOLDER/run_whole/checkpoints/99": "--resume): expected a checkpoint (",
    # the engine
    **{
        f"{command} --model FOLDER/chunked --dataset guess --environment guess": (
            "rollout.environment: expected a model that the embedded engine or vLLM can serve"
        )
        for command in ("grpo", "grpo --dry-run", "eval")
    },
    # reward models
    **{
        f"{command} --reward FOLDER/two_labels": "expected which of the labels of"
        for command in ("grpo", "grpo --dry-run", "eval --model tiny")
    },
    "grpo --reward FOLDER/two_labels reward.model_label=2": "0 to 1",
    "grpo --reward math reward.model_label=0": "reward.model_label",
    "grpo --reward FOLDER/one_label reward.model_device=1": "reward.model_device",
    "grpo --reward FOLDER/one_label reward.model_device=1 devices.infer=ray:1": "ray",
    "grpo --reward FOLDER/one_label data.chat=true": "chat template",
    "grpo --reward FOLDER/refuses": "...ForSequenceClassification (config.json), got ",
    "grpo --reward FOLDER/taken": "config.json",
    "grpo --reward FOLDER/no_reward_tokenizer": "has no tokenizer",
    "grpo --reward FOLDER/own_reward_code": "model.trust_remote_code",
    "grpo --reward nobody/nothing": "nobody/nothing",
    "grpo --reward maths": "did you mean math?",
    "grpo --reward ./nothing": "reward.functions (--reward): expected",
    # reasoning-gym
    "grpo --dataset reasoning_gym:chain_sums": "chain_sum,",
    f"grpo {SUMS} data.options={{max_digits:\\ two}}": "data.options.max_digits",
    f"grpo {SUMS} data.options={{max_digits:\\ true}}": "data.options.max_digits",
    f"grpo {SUMS} data.options={{max_digit:\\ 2}}": "max_digits",
    f"grpo {SUMS} data.options={{seed:\\ 2}}": "max_digits",
    f"grpo {SUMS} data.options={{max_digits:\\ 1,min_digits:\\ 3}}": "min_digits",
    f"grpo {SUMS} data.options={{chain_sum:\\ 3}}": "chain_sum",
    f"grpo {SUMS} {LEGS} data.options={{max_digits:\\ 2}}": "data.options",
    f"grpo {SUMS} {LEGS} data.options={{chain_sum:\\ 2}}": "data.options",
    "grpo data.options={max_digits:\\ 2}": "data.options",
    "grpo --dataset reasoning_gym:composite": "data.options",  # needs an option
    f"grpo {SUMS} data.options={{level:\\ [0,3]}}": "rows_per_level: N}, got [0, 3] and None",
    f"grpo {SUMS} data.options={{level:\\ 99}}": "data.options.level: expected at most 10, got 99",
    "grpo --dataset reasoning_gym:acre data.options={level:\\ 1}": "acre has no levels",
    f"grpo {SUMS} data.max_prompt_length=90": "reasoning_gym:chain_sum, row",
    f"grpo {SUMS} data.max_prompt_length=90 data.long_prompts=skip": "ones cannot be skipped",
    # planning
    **{
        f"grpo --dry-run --model FOLDER/qwen --assume '{text}'": "--assume: expected"
        for text in ("", "8x", "0x80GiB", "8x8", "a")
    },
    f"{PLAN} --model FOLDER/qwen --infer-devices 0 --train-devices 8": "0-7",
    f"{PLAN} --model FOLDER/qwen --infer-devices cpu": "--assume",
    f"{PLAN} --model /no/such/folder": "model.path",
    f"{PLAN} --model FOLDER/qwen data.max_prompt_length=50000"
    " train.max_tokens_per_micro_batch=60000": "data.max_prompt_length",
    f"grpo --dry-run {EXACT}/good.jsonl data.max_prompt_length=2": "data.max_prompt_length",
    f"grpo --dry-run {EXACT}/chat.jsonl": "data.chat_template",
    **{
        f"{command} {EXACT}/good.jsonl --dataset FOLDER/other.jsonl"
        " 'data.columns=[{}, {prompt: question, truth: answer}]'": "other.jsonl': reward.functions"
        for command in ("grpo", "grpo --dry-run")
    },
    f"grpo --dry-run {EXACT}/good.jsonl --dataset FOLDER/./good.jsonl": "each name once",
    "grpo --dry-run --dataset FOLDER/good.jsonl": "reward.functions",
    "grpo --dry-run --dataset FOLDER/good.jsonl --reward no_such.py:f": "reward.functions",
    "grpo --dry-run --dataset FOLDER/good.jsonl --reward FOLDER/r.py:a_set": "r.py:a_set",
    "grpo --dry-run --dataset FOLDER/good.jsonl --reward FOLDER/r.py:a_number": "operand, not int",
    "grpo --dry-run --dataset FOLDER/good.jsonl --reward FOLDER/r.py:text"
    " data.columns={a:\\ answer}": "'answer'",
    f"grpo --dry-run {EXACT}/good.jsonl algorithm.loss_type=no.py:f": "loss_type",
    "grpo --dry-run --dataset hub/data --environment no.py:E": "rollout.environment",
    "grpo --dry-run --output FOLDER/taken": "--output",
    "grpo --no-live --dry-run --resume FOLDER/run_whole algorithm.beta=0.1": "algorithm.beta",
    f"grpo --dry-run {EXACT}/good.jsonl eval.dataset=no.jsonl": "eval.dataset: there is no file",
    "grpo --dry-run --model FOLDER/good.jsonl": "good.jsonl' is a file (GGUF files are quantized)",
    f"grpo --dry-run {EXACT}/good.jsonl,more.jsonl": "each has its own --dataset",
    f"grpo --dry-run {EXACT}/good.jsonl more.jsonl": "--dataset more.jsonl",
    "grpo my.yaml": "--config my.yaml",
    "grpo --report-to wandb": "output.log_to=[tensorboard] (or",
    "grpo model.lora.target_modules=all-linear": "use model.lora.target_modules=null",
    "grpo peft_config=r16": "in EasyRL: model.lora.rank",
    "grpo bf16=true": "in EasyRL: model.dtype=bfloat16",
    # evaluation
    "eval eval.temperature=0 --num-samples 2": "eval.num_samples",
    "eval data.num_held_out=0": "data.num_held_out",
    "eval --output FOLDER/taken": "output.dir",
    "eval --compare FOLDER/taken": "compare (--compare)",
    "eval --model FOLDER/taken": "config.json",
    "eval --model FOLDER/evaluation": "the folder of an evaluation",
    "eval eval.max_completion_length=513": "data.max_prompt_length",
    "eval --num-samples 100000000": "rollout.max_concurrent_groups",
    # benchmarks
    "bench peer --rows 'tiny_short, large'": "'large'",
    "bench peer --rows tiny_short,": "''",
    "bench peer --rows smollm2_lora": "--rows smollm2_lora: expected --model FOLDER",
    "bench peer --infer-devices gpu": "devices.infer",
    "bench peer --infer-devices ray:cpu:1 --train-devices ray:cpu:1": "ray:cpu:1",
    "bench peer --model no/such/folder": "no/such/folder",
    # folders of runs
    "samples FOLDER/taken": "samples.jsonl",
    "samples FOLDER/samples/none": "no such sample",
    "samples FOLDER/samples --min-reward 7": "--min-reward",
    "samples FOLDER/samples --iteration 0": "--iteration",
    "samples FOLDER/samples --limit 0": "'--limit'",
    **{
        f"{command} FOLDER/{folder}": message
        for command in ("status", "stop", "scale --infer-devices cpu")
        for folder, message in (
            ("nowhere", "expected the folder of a run"),
            ("taken", "expected the folder of a run"),
            ("run_whole", "has ended"),
        )
    },
}
