"""Mistakes as a user types them, and the files they are made with."""

import json
import shutil
from pathlib import Path

from easyrl.config import load_config, to_commented_yaml
from easyrl.model import checkpoint_files
from easyrl.model.files import fingerprint
from easyrl.runtime.run_folder import lock_folder

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
"""
CHAT = [{"role": "user", "content": "1+1="}]


def write_files(folder):
    texts = {
        "good.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
        "broken.jsonl": '{"prompt": "1+1="}\n{"prompt": \n',
        "other.jsonl": '{"question": "1+1=", "answer": "2"}\n',
        "chat.jsonl": "".join(json.dumps({"prompt": CHAT, "answer": "2"}) + "\n" for _ in "ab"),
        "long.jsonl": '{"prompt": "1+1=", "answer": "2"}\n\n'
        '{"prompt": "1+1+1+1+1=", "answer": "5"}\n',
        "half.jsonl": '{"prompt": "1+1= \\ud83d", "answer": "2"}\n',
        "r.py": REWARDS,
        "fails.py": "import math\n\nimport nothing_of_that_name\n",
        "syntax.yaml": "train:\n  iterations: [1\nmodel: {}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "taken").mkdir()
    for name, change in (BROKEN_MODELS | OTHER_MODELS).items():
        shutil.copytree(TINY, folder / name)
        change(folder / name)
    for name, states in RUNS.items():
        make_run(folder / name, states)
    locks.append(lock_folder(folder / "run_in_use"))


def make_run(folder, states):
    (folder / "checkpoints").mkdir(parents=True)
    config = load_config(settings={"output.dir": str(folder)})
    (folder / "config.yaml").write_text(to_commented_yaml(config))
    for version, special in states.items():
        state = {
            "num_iterations": version,
            "policy_version": version,
            "config": config.model_dump(mode="json"),
            "identity": {"model.path": fingerprint("tiny"), "data.dataset": None},
            "file_sizes": {},
        }
        text = special
        if not isinstance(special, str):
            content = {"format": 1, "files": {}, "sha256": {}, "state": state | special}
            own = checkpoint_files._content_sha256(content)
            text = json.dumps(content | {checkpoint_files.OWN_CHECKSUM: own})
        (folder / "checkpoints" / str(version)).mkdir()
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
}

NO_OUTPUT = "--no-live"
"""Takes the place of --output where the run folder must not be named (it changes nothing else)."""

# What is typed after `easyrl grpo`, and the key, flag or line that the error names. FOLDER holds
# the files. Values that a key does not take are in test_config.
EXACT = "--reward exact_match --dataset FOLDER"
MISTAKES = {
    # words, flags and the config file
    "--seed=-1": "runtime.seed",
    "--learning-rate 1": "train.learning_rate=VALUE",
    "algorithm.loss_type=gspo": "algorithm.importance_sampling_level=sequence",
    "--config FOLDER/syntax.yaml": "syntax.yaml:3",
    "rollout.max_completion_length=600": "data.max_prompt_length + rollout.max_completion_length",
    "train.eval_every=5 data.num_held_out=0": "train.eval_every",
    # LoRA
    "model.lora.rank=4 model.lora.target_modules=[q_proj,c_attn]": "model.lora.target_modules",
    "model.lora.rank=100000000": "model.lora.rank",
    # devices
    "--infer-devices 0-3": "devices.infer",
    "--train-devices cpu:3 train.updates_per_iteration=8": "devices.train",
    # the model
    "--model nobody/nothing": "model.path",
    **{f"--model FOLDER/{name}": "model.path" for name in BROKEN_MODELS},
    "--model FOLDER/own_code": "model.trust_remote_code=true",
    "--model FOLDER/longrope": "data.max_prompt_length + rollout.max_completion_length",
    # data
    "--dataset none.jsonl": "data.dataset",
    "eval.dataset=FOLDER/other.jsonl": "data.prompt_column",
    f"{EXACT}/broken.jsonl": "broken.jsonl:2",
    f"{EXACT}/long.jsonl data.max_prompt_length=6": "long.jsonl:3",
    f"{EXACT}/chat.jsonl": "chat.jsonl:1",
    f"{EXACT}/chat.jsonl --model FOLDER/refuses": "chat.jsonl:1",
    f"{EXACT}/chat.jsonl --model FOLDER/thinks data.chat_template_kwargs={{x:\\ 1}}": (
        "data.chat_template_kwargs"
    ),
    f"{EXACT}/good.jsonl data.chat_template={{{{x}}}}": "data.chat=true",
    f"{EXACT}/half.jsonl": "half.jsonl:1",
    # rewards
    "--dataset FOLDER/good.jsonl": "reward.functions",
    "--reward exactmatch": "did you mean exact_match?",
    "--reward FOLDER/r.py": "r.py:one_for_all or ",
    "--reward FOLDER/fails.py:score": 'fails.py", line 3',
    "--reward code --dataset FOLDER/good.jsonl": "tests",
    "--reward FOLDER/r.py:truth --dataset FOLDER/good.jsonl": "column 'ground_truth'; the data",
    "--reward FOLDER/r.py:one_for_all --dataset FOLDER/good.jsonl": "reward.functions",
    "--reward FOLDER/r.py:text --dataset FOLDER/chat.jsonl": "read completion[0]['content']",
    # the ring, memory, the disk
    "rollout.num_generations=100000 train.prompts_per_iteration=4000": "rollout.ring_slots",
    "train.keep_checkpoints=100000000": "train.keep_checkpoints",
    "--output FOLDER/taken": "--output",
    # resuming
    "--no-live --resume FOLDER/nowhere": "--resume",
    "--no-live --resume FOLDER/run_without": "train.save_every",
    "--no-live --resume FOLDER/run_broken": "checkpoints/20",
    "--no-live --resume FOLDER/run_in_use": "output.dir",
    "--no-live --resume FOLDER/run_whole algorithm.beta=0.1": "algorithm.beta",
    "--no-live --resume FOLDER/run_other_model": "model.path",
    "--no-live --resume FOLDER/run_whole --iterations 9": "train.iterations",
    "--resume FOLDER/run_whole --output elsewhere": "--output",
}
