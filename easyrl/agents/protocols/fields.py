"""The fields of requests that no protocol reads: about sampling, without effect, or unknown."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from easyrl.agents.protocols.base import ApiError, PictureReader, check_mapping, check_schema
from easyrl.config.rollout import SamplingChoice
from easyrl.config.spec import EpisodeSpec

WITHOUT_EFFECT = {
    "cache_control",
    "client_metadata",
    "include",
    "max_tool_calls",
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "truncation",
    "user",
    "verbosity",
}
"""Fields that change nothing here."""
CHANGES_SAMPLING = {
    "allowed_token_ids",
    "bad_words",
    "chat_template",
    "continue_final_message",
    "best_of",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "length_penalty",
    "logit_bias",
    "min_tokens",
    "prediction",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "typical_p",
    "use_beam_search",
}
"""Fields of OpenAI's API and of known servers that ask for another distribution of tokens, or show
the model another prompt."""
NOT_SUPPORTED = {
    "audio",
    "background",
    "container",
    "conversation",
    "echo",
    "functions",
    "logprobs",
    "mcp_servers",
    "modalities",
    "prompt_logprobs",
    "suffix",
    "top_logprobs",
    "web_search_options",
}
"""Fields whose answer would be another one."""
NEUTRAL: list[Any] = [None, False, 0, "", [], {}, ["text"]]
"""Values of such fields that ask for nothing."""


class FieldRules:
    """What requests may ask for in a run."""

    def __init__(self, spec: EpisodeSpec, of_engine: SamplingChoice) -> None:
        """`of_engine`: its sampling; requests may also name that of training."""
        self._replaces_sampling = spec.ignores_sampling
        self.picture_reader = PictureReader() if spec.shows_pictures else None
        stop = list(spec.stop)
        one_stop = [stop, *stop] if len(stop) == 1 else [stop]  # it may be given without a list
        self._template_variables = dict(spec.chat_template_kwargs)
        self._allowed: dict[str, list[Any]] = {
            "frequency_penalty": [0],
            "presence_penalty": [0],
            "best_of": [1],
            "min_p": [0],
            "seed": [],
            "repetition_penalty": [1],
            "stop": one_stop,
            "stop_sequences": one_stop,
        }
        for name in ("temperature", "top_p", "top_k"):
            values = (getattr(spec.sampling, name), getattr(of_engine, name))
            self._allowed[name] = list(dict.fromkeys(values))

    def check(self, body: Mapping[str, Any], read: Collection[str]) -> set[str]:
        """Check the fields that a protocol does not read itself. Return notes on those that are
        replaced or ignored. Raises ApiError for others."""
        notes: set[str] = set()
        for name, value in body.items():
            if value is None or name in read or name in WITHOUT_EFFECT:
                continue
            if name == "chat_template_kwargs":
                self._check_template(value)
            elif name in self._allowed:
                notes |= self._check_sampling(name, value)
            elif name in CHANGES_SAMPLING or name in NOT_SUPPORTED:
                if value not in NEUTRAL:
                    raise ApiError(f"{name}: this field is not supported", "unsupported_parameter")
            else:
                notes.add(f"the field '{name:.80}' of the agent's requests is unknown and ignored")
        return notes

    def _check_template(self, given: Any) -> None:
        """Raise ApiError for other variables of the chat template than the run's."""
        for variable, value in check_mapping("chat_template_kwargs", given).items():
            own = self._template_variables.get(variable)
            if own != value:
                expected = "as in the run (data.chat_template_kwargs)"
                name = f"chat_template_kwargs: {variable}"
                raise ApiError(f"{name}: expected {own!r}, {expected}, got {value!r:.80}")

    def _check_sampling(self, name: str, value: Any) -> set[str]:
        allowed = self._allowed[name]
        if value in allowed:
            return set()
        if self._replaces_sampling:
            return {f"what the agent asks for by {name} is replaced by the run's"}
        expected = " or ".join(map(str, allowed)) or "none"
        same = "as in the run (rollout.agent_sampling=ignore replaces others)"
        raise ApiError(f"{name}: expected {expected}, {same}, got {value!r:.80}")


def output_form(field_name: str, given: Any) -> str:
    """Return the sentence that asks for an answer of a form, from `response_format` or
    `text.format`; "" for any text. Nothing constrains what is sampled: a grammar would change the
    distribution that is trained. Raises ValueError."""
    form = check_mapping(field_name, given)
    kind = form.get("type", "text")
    if kind == "text":
        return ""
    if kind == "json_object":
        return "Answer with one JSON object and nothing else."
    if kind != "json_schema":
        expected = "expected the type text, json_object or json_schema"
        raise ValueError(f"{field_name}: {expected}, got {kind!r:.80}")
    described = check_mapping(field_name, form.get("json_schema") or form)
    schema = described.get("schema")
    check_schema(f"{field_name}: schema", schema)
    return (
        "Answer with one JSON value that fits this JSON schema, and nothing else:\n"
        f"{json.dumps(schema, ensure_ascii=False)}"
    )


UNCONSTRAINED_NOTE = (
    "{name}: the model is shown what an answer should be, but what it samples is not constrained, "
    "which would change the distribution that is trained"
)
CHOICE_NOTE = (
    "tool_choice: a call is not forced, which would change the distribution that is trained"
)
