"""Suggestions for unknown keys: names in other trainers, unsupported features, typos."""

import re

from rptrain.config.schema import Config, keys
from rptrain.utils.suggest import nearest

# Names that other trainers have for our keys (TrainingArguments, TRL, axolotl, LLaMA-Factory, torchtune), and earlier
# names of ours.
_ALIASES = {
    "model.path": "model_name_or_path pretrained_model_name_or_path base_model model_name model_id checkpoint_dir",
    "model.dtype": "torch_dtype precision model_dtype bf16 pure_bf16 bfloat16 fp32 float32 fp16 float16 half pure_fp16",
    "model.init": "train_from_scratch random_init from_scratch",
    "data.train": "dataset datasets dataset_name train_dataset",
    "data.train.path": "train_file data_path data_file data_files dataset_path dataset_dir source",
    "data.train.format": "formatting ds_type dataset_type dataset_format conversation_style",
    "data.train.split": "dataset_train_split train_split",
    "data.train.weight": "weights dataset_weight sampling_weight",
    "data.overlong": "excess_length_strategy truncation_strategy overlong_strategy",
    "data.cache_dir": "dataset_prepared_path tokenized_path dataset_cache_dir",
    "data.max_length": "cutoff_len sequence_len seq_len max_seq_len max_seq_length sequence_length "
    "model_max_length block_size context_length",
    "data.packing": "sample_packing packed neat_packing pack",
    "data.chat_template": "template chat_template_path chat_template_jinja prompt_template conversation_template",
    "train.method": "finetuning_type use_peft peft_config training_type",
    "train.freeze": "freeze_modules frozen_layers freeze_layers freeze_parameters frozen_parameters",
    "train.router_aux_loss_coef": "aux_loss_coef moe_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha",
    "train.micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size batch_size "
    "train_batch_size train_micro_batch_size_per_gpu",
    "train.global_batch_size": "total_batch_size total_train_batch_size effective_batch_size",
    "train.num_epochs": "num_train_epochs epochs n_epochs epoch",
    "train.max_steps": "max_train_steps total_steps num_steps num_training_steps max_iters max_steps_per_epoch",
    "train.seed": "data_seed random_seed",
    "lora.r": "lora_r lora_rank rank",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "lora.dropout",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear lora_attn_modules",
    "lora.use_rslora": "rslora peft_use_rslora",
    "lora.use_dora": "dora peft_use_dora",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.base": "load_in_4bit load_in_8bit bnb_4bit_quant_type quantization_bit quantize_base qlora fp8_base",
    "lora.target_parameters": "lora_target_parameters",
    "lora.adapter": "adapter_name_or_path lora_model_dir",
    "optim.learning_rate": "lr peak_lr max_lr",
    "optim.lr_scheduler_type": "lr_scheduler scheduler lr_schedule scheduler_type lr_decay_style",
    "optim.warmup_steps": "warmup_ratio num_warmup_steps warmup lr_warmup_steps",
    "optim.weight_decay": "wd decay",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.moments": "optim_bits optimizer_bits optimizer_state_dtype optim_state_dtype",
    "optim.loss_scale": "init_scale initial_loss_scale initial_scale_power loss_scale_init",
    "optim.loss_scale_steps": "loss_scale_window growth_interval scale_window",
    "optim.max_grad_norm": "gradient_clipping clip_grad_norm gradient_clip_val grad_clip max_norm clip_grad",
    "engine.devices": "device gpus num_gpus n_gpu n_gpus gpu_ids cuda_visible_devices nproc_per_node num_processes",
    "engine.vram_limit": "gpu_memory_limit max_gpu_memory vram",
    "engine.host_limit": "cpu_memory_limit max_cpu_memory ram_limit",
    "engine.optimizer_threads": "num_threads omp_num_threads cpu_threads",
    "engine.fp8": "float8 enable_fp8 use_fp8 fp8_training",
    "engine.fp16_accumulation": "allow_fp16_accumulation fp16_accumulate",
    "engine.reduce_dtype": "communication_data_type grad_reduce_in_fp32",
    "engine.trace": "profile profiler",
    "save.save_steps": "save_every save_every_n_steps checkpoint_every checkpoint_steps save_interval",
    "save.save_total_limit": "keep_last_n_checkpoints max_checkpoints",
    "save.load_best_model_at_end": "save_best keep_best load_best_model save_best_model",
    "save.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "data.val_size": "val_set_size eval_split_ratio validation_split",
    "data.val.path": "test_datasets val_sets eval_datasets eval_dataset",
    "train.eval_steps": "eval_every eval_interval evaluation_steps",
    "log.report_to": "wandb use_wandb tensorboard trackio metric_logger",
    "log.project": "wandb_project",
    "log.logging_steps": "log_every_n_steps log_interval log_every log_steps",
    "log.run_name": "experiment_name wandb_name exp_name",
}
_CANONICAL = {alias: key for key, aliases in _ALIASES.items() for alias in aliases.split()}

# Words without a key of the same meaning, and what to write instead.
_ADVICE = {
    word: advice
    for words, advice in {
        "gradient_accumulation_steps gradient_accumulation grad_accum": "it follows from "
        "`train.global_batch_size` / `train.micro_batch_size`",
        "train_on_inputs train_on_input train_on_prompt": "use the opposite, `data.assistant_only_loss`",
        "double_quant": "it was removed; a run that has it set can only be resumed by the version of rptrain that "
        "began it",
        "completion_only_loss train_on_responses_only": "use `data.assistant_only_loss`",
        "interleave_probs mix_strategy interleave_strategy probabilities": "use `data.train.weight`, "
        "how often a set is used per epoch",
        "gradient_checkpointing activation_checkpointing enable_activation_checkpointing "
        "gradient_checkpointing_kwargs enable_activation_offloading activation_offloading": "not needed: "
        "rptrain always recomputes and offloads activations",
        "fp16_opt_level fp16_backend half_precision_backend": 'not needed: set `model.dtype = "float16"`',
        "deepspeed fsdp fsdp_config fsdp_version accelerator_config fsdp_cpu_offload": "not needed: "
        "rptrain always keeps the model in host memory; `engine.devices` names the GPUs",
        "flash_attention attn_implementation flash_attn sdp_attention use_flash_attention_2": "not needed: "
        "rptrain chooses its attention kernel",
    }.items()
    for word in words.split()
}

# Features that rptrain does not have. A word that ends in "*" matches every word that starts with it.
_UNAVAILABLE = {
    word: feature
    for feature, words in {
        "LoRA on layers by number": "peft_layers_to_transform layers_to_transform lora_layers",
        "another initialization of adapters": "init_lora_weights pissa_init loftq_config peft_init_lora_weights",
        "double quantization": "bnb_4bit_use_double_quant double_quantization use_double_quant",
        "a choice of how weights are quantized": "quantization quantization_* bnb_4bit_* use_bnb",
        "a choice of optimizer": "optimizer optim_args optimizer_type optimizer_in_bwd",
        "another metric for the best model than the loss": "metric_for_best_model greater_is_better",
        "another batch size for evaluation": "per_device_eval_batch_size eval_batch_size",
        "a tracker other than those of log.report_to": "mlflow_* swanlab_* comet_* logging_dir",
        "publishing to a hub": "push_to_hub hub_*",
        "regularization of the loss": "label_smoothing_factor label_smoothing neftune_noise_alpha dropout",
        "preference and reinforcement learning": "rl dpo_* kto_* grpo_* pref_* beta reward_* stage",
    }.items()
    for word in words.split()
}

# Names of optimizers, as values of any key, that are settings here.
_SMALL_MOMENTS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")

_KEYS = [*keys(), "data.train"]
_KEY = re.compile("`([a-z_.]+)`")
_BY_LEAF = {key.rpartition(".")[2]: key for key in keys()}


def other_names() -> dict[str, tuple[str, ...]]:
    """The names of each key in other trainers, and those that it replaces, by the first key of their advice."""
    names = {key: aliases.split() for key, aliases in _ALIASES.items()}
    for word, advice in _ADVICE.items():
        if found := _KEY.search(advice):
            names.setdefault(found[1], []).append(word)
    return {key: tuple(words) for key, words in names.items() if key in keys()}


def answer(dotted: str, value: object = None) -> str:
    """The suggestion for the unknown key `dotted`, written without array indices, with this value or table."""
    if isinstance(value, str) and value.lower().replace("-", "_") in _SMALL_MOMENTS:
        return 'use `optim.moments = "int8"`'
    section, _, leaf = dotted.rpartition(".")
    leaf = leaf.lower().replace("-", "_")
    if leaf in _ADVICE:
        return _ADVICE[leaf]
    if key := _CANONICAL.get(dotted) or _CANONICAL.get(leaf):
        return f"use `{key}`"
    for word in (part.lower() for part in (leaf, *section.split("."))):
        if feature := _unavailable(word):
            return f"{feature} is not available in this version"
    if leaf in _BY_LEAF:
        return f"use `{_BY_LEAF[leaf]}`"
    siblings = {key[len(section) + 1 :]: key for key in _KEYS if key.startswith(f"{section}.")}
    if near := nearest(leaf, siblings):
        return f"did you mean `{siblings[near[0]]}`?"
    if near := nearest(dotted, _KEYS, 1, 0.7) or nearest(leaf, _BY_LEAF, 1, 0.7):
        return f"did you mean `{_BY_LEAF.get(near[0], near[0])}`?"
    if siblings:
        return f"[{section}] has: {', '.join(siblings)}"
    return f"the tables are: {', '.join(f'[{name}]' for name in Config.model_fields)}"


def _unavailable(word: str) -> str | None:
    for known, feature in _UNAVAILABLE.items():
        if word == known or (known.endswith("*") and word.startswith(known[:-1])):
            return feature
    return None
