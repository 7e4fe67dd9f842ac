"""Checks of what a run learns from: a reward or a teacher, and one that fits the policy."""

from operator import itemgetter

from easyrl.config import ConfigError
from easyrl.config.algorithm import TEACHER_KEY, TEACHER_PROMPT_KEY
from easyrl.config.spec import RunSpec
from easyrl.model.files import ModelFiles, check_positions, load_tokenizer, read_loaded_files


def check_signal(spec: RunSpec) -> None:
    """Raise ConfigError for a run that nothing trains: without rewards that are needed, or with a
    teacher that sees what the policy sees."""
    teacher = spec.teacher
    if spec.rewards.is_none and (teacher is None or spec.advantages.dynamic_sampling):
        other = TEACHER_KEY if teacher is None else "algorithm.dynamic_sampling=false"
        raise ConfigError(f"reward.functions: expected a reward (--reward) or {other}, got none")
    if teacher is not None and teacher.path is None and not teacher.has_own_prompt:
        raise ConfigError(
            f"{TEACHER_PROMPT_KEY}: expected a column or a template, without which the policy "
            "agrees with itself (algorithm.teacher=policy), got null"
        )


def check_teacher(spec: RunSpec) -> None:
    """Raise ConfigError for a teacher model that cannot score the policy's completions."""
    if spec.teacher is None or spec.teacher.path is None:
        return
    path = spec.teacher.path
    trusts = spec.model.trust_remote_code
    teacher = read_loaded_files(path, TEACHER_KEY, trust_remote_code=trusts)
    check_positions(spec.limits, teacher)
    _check_same_tokens(spec.model.path, path, trusts=trusts)
    policy = read_loaded_files(spec.model.path, trust_remote_code=trusts)
    num_sampled = _vocabulary_size(policy)
    num_scored = _vocabulary_size(teacher)
    if num_sampled > num_scored:  # a sampled token might be padding that the teacher lacks
        raise ConfigError(
            f"{TEACHER_KEY}: expected a vocabulary of at least {num_sampled} with its padding, as "
            f"the policy's, got {num_scored} in '{path}'"
        )


def _check_same_tokens(policy: str, teacher: str, *, trusts: bool) -> None:
    vocabularies = []
    for path in (policy, teacher):
        tokenizer = load_tokenizer(path, trust_remote_code=trusts)
        vocabularies.append(tokenizer.get_vocab().items())  # token, number
    differing = vocabularies[0] ^ vocabularies[1]
    if differing:
        token, number = min(differing, key=itemgetter(1))
        raise ConfigError(
            f"{TEACHER_KEY}: expected the policy's tokens, as it scores them, got '{teacher}', "
            f"which differs in token {number} ({token!r} in one of them); use a model of the same "
            "family"
        )


def _vocabulary_size(files: ModelFiles) -> int:
    text_config = files.config.get("text_config") or files.config
    return int(text_config.get("vocab_size", 0))
