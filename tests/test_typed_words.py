"""Words that users of other trainers type: each is answered with the setting here, or with what to
do where there is none."""

import pytest

from easyrl.config import ConfigError, key_hint, load_config
from runs import easyrl

NOTHING = "nothing"
TRL = {
    "callbacks": "callbacks=[",
    "early_stopping_patience": "stop_when",
    "generation_kwargs": "rollout.temperature",
    "stop_strings": "rollout.stop",
    "deepspeed": "train.offload",
    "fsdp_config": "devices.train",
    "push_to_hub": "easyrl export",
    "hub_model_id": "easyrl export",
    "report_to": "output.log_to",
    "load_best_model_at_end": "train.eval_every",
    "metric_for_best_model": "train.eval_every",
    "save_strategy": "train.save_every",
    "logging_dir": "output.dir",
    "num_generations_eval": "eval.num_samples",
    "shuffle_dataset": "data.shuffle",
    "vllm_server_base_url": "rollout.engine",
    "vllm_enable_sleep_mode": "rollout.memory_fraction",
    "vllm_max_model_length": "data.max_prompt_length",
    "vllm_structured_outputs_regex": "reward.functions=format",
    "vllm_importance_sampling_correction": "algorithm.importance_sampling_correction",
    "delta": "algorithm.loss_type",
    "top_entropy_quantile": "algorithm.loss_type",
    "ref_model_sync_steps": NOTHING,
    "use_bias_correction_kl": "algorithm.beta",
    "num_completions_to_print": "easyrl samples",
    "cast_lm_head_to_fp32": NOTHING,
    "router_aux_loss_coef": NOTHING,
    "dataset_name": "data.dataset",
    "dataset_train_split": "owner/name:subset:split",
    "dataset_test_split": "eval.dataset",
    "processing_class": "data.chat_template",
    "quantization_config": "model.lora.rank",
    "rollout_func": "rollout.agent",
    "attn_implementation": "model.attention",
    "model_revision": "model.path",
    "use_rslora": NOTHING,
    "lora_target_modules": "model.lora.target_modules",
    "per_device_eval_batch_size": NOTHING,
    "gradient_checkpointing_kwargs": "train.activation_checkpointing",
    "lr_scheduler_kwargs": "train.lr_scheduler_type",
    "full_determinism": "runtime.deterministic",
    "ddp_timeout": "runtime.timeout_seconds",
    "fp16": "model.dtype=bfloat16",
    "data_seed": "runtime.seed",
    "eval_on_start": "train.eval_every",
    "model_init_kwargs": "model.attention",
    "multi_objective_aggregation": NOTHING,
    "overwrite_output_dir": "--resume RUN",
    "save_only_model": "train.keep_checkpoints",
    "chat_template_path": "data.chat_template",
    "reward_fn": "reward.functions",
    "hub_token": "hf upload",
    "pad_token": "tokenizer",
}
UNSLOTH = {
    "fast_inference": "rollout.engine=vllm",
    "max_seq_length": "rollout.max_completion_length",
    "max_lora_rank": "model.lora.rank",
    "load_in_16bit": "model.dtype=bfloat16",
    "load_in_fp8": NOTHING,
    "full_finetuning": "model.lora.rank",
    "random_state": "runtime.seed",
    "use_gradient_checkpointing": "train.activation_checkpointing",
    "unsloth_vllm_standby": "rollout.memory_fraction",
    "finetune_vision_layers": "model.vision",
}
MS_SWIFT = {
    "quantization_bit": NOTHING,
    "tuner_type": "model.lora.rank",
    "rlhf_type": "easyrl grpo",
    "val_dataset": "eval.dataset",
    "split_dataset_ratio": "eval.dataset",
    "system": "data.system_prompt",
    "stop_words": "rollout.stop",
    "external_plugins": "reward.functions",
    "reward_model": "reward.functions",
    "soft_cache_length": "length_penalty",
    "overlong_filter": "algorithm.mask_truncated_completions",
    "dynamic_sample": "algorithm.dynamic_sampling",
    "multi_turn_scheduler": "rollout.environment",
    "interleave_prob": "data.weights",
    "enable_thinking": "data.chat_template_kwargs",
    "truncation_strategy": "data.long_prompts",
    "async_generate": "runtime.schedule",
    "teacher_model": "algorithm.teacher",
    "sequence_parallel_size": NOTHING,
    "padding_free": NOTHING,
    "move_model_batches": NOTHING,
}
VERL = {
    "trainer.n_gpus_per_node": "devices.infer",
    "trainer.val_before_train": "train.eval_every",
    "trainer.project_name": "WANDB_PROJECT",
    "trainer.rollout_data_dir": "output.samples",
    "data.filter_overlong_prompts": "data.long_prompts=skip",
    "data.prompt_key": "data.prompt_column",
    "data.truncation": "data.long_prompts",
    "algorithm.use_kl_in_reward": "algorithm.beta",
    "algorithm.lam": "algorithm.advantage_estimator",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.beta",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.loss_type",
    "actor_rollout_ref.actor.use_dynamic_bsz": "train.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": NOTHING,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "train.offload",
    "actor_rollout_ref.model.use_remove_padding": NOTHING,
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_concurrent_groups",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": NOTHING,
    "actor_rollout_ref.rollout.free_cache_engine": "rollout.memory_fraction",
    "reward.reward_manager": "reward.functions",
}
WORDS = TRL | UNSLOTH | MS_SWIFT | VERL


@pytest.mark.parametrize("name", WORDS)
def test_a_word_of_another_trainer_is_answered(name):
    with pytest.raises(ConfigError) as caught:
        load_config(words=[f"{name}=1"])
    problem = str(caught.value)
    assert problem.startswith(f"{name}: unknown setting; in EasyRL: ")
    assert WORDS[name] in problem
    assert WORDS[name] in key_hint(name, "=VALUE")  # of an option, `--NAME`


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("report_to=tensorboard", ["tensorboard"]),
        ("report_to=wandb", ["wandb"]),
        ("report_to=[wandb, trackio]", ["wandb", "trackio"]),
        ("trainer.logger=[console, wandb]", ["wandb"]),
    ],
)
def test_the_answer_has_the_trackers_that_were_typed(word, expected):
    result = easyrl("grpo", word)
    assert f"output.log_to=[{', '.join(expected)}]" in result.output
    assert load_config(words=[f"output.log_to={expected}"]).output.log_to == expected
