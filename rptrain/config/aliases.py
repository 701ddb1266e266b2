"""Suggestions for unknown keys and values: names in other trainers, unsupported features, typos."""

import re
from collections.abc import Iterable, Iterator, Sequence

from rptrain.config.schema import Config, keys
from rptrain.utils.suggest import edits, typo_of

# Names that other trainers have for our keys (TrainingArguments, TRL, axolotl, LLaMA-Factory, Unsloth, torchtune), and
# earlier names of ours. A name with a table stands for the key in that table alone, one with a leading dot for the key
# without a table.
ALIASES = {
    "model.path": "model_name_or_path pretrained_model_name_or_path base_model model_name model_id checkpoint_dir "
    "model.base model.name",
    "model.dtype": "torch_dtype precision model_dtype bf16 pure_bf16 bfloat16 fp32 float32 fp16 float16 half pure_fp16",
    "model.init": "train_from_scratch random_init from_scratch",
    "data.train": "dataset datasets dataset_name train_dataset",
    "data.train.path": "train_file data_path data_file data_files dataset_path dataset_dir source data.path",
    "data.train.format": "formatting ds_type dataset_type dataset_format conversation_style data.train.type data.type "
    "data.val.type data.format",
    "data.train.split": "dataset_train_split train_split data.split",
    "data.train.weight": "dataset_weight sampling_weight data.weight data.weights data.train.weights data.val.weights",
    "data.overlong": "excess_length_strategy truncation_strategy overlong_strategy",
    "data.cache_dir": "dataset_prepared_path tokenized_path dataset_cache_dir",
    "data.max_length": "cutoff_len sequence_len seq_len max_seq_len max_seq_length sequence_length "
    "model_max_length block_size context_length data.length",
    "data.packing": "sample_packing packed neat_packing pack",
    "data.columns": "column_mapping column_map columns_mapping",
    "data.chat_template": "template chat_template_path chat_template_jinja prompt_template conversation_template "
    "jinja_template",
    "train.method": "finetuning_type use_peft peft_config training_type full_finetuning .adapter model.adapter "
    "train.adapter",
    "train.freeze": "freeze_modules frozen_layers freeze_layers freeze_parameters frozen_parameters",
    "train.router_aux_loss_coef": "aux_loss_coef moe_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha",
    "train.micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size batch_size "
    "train_batch_size train_micro_batch_size_per_gpu auto_find_batch_size",
    "train.global_batch_size": "total_batch_size total_train_batch_size effective_batch_size",
    "train.num_epochs": "num_train_epochs epochs n_epochs epoch",
    "train.max_steps": "max_train_steps total_steps num_steps num_training_steps max_iters max_steps_per_epoch "
    "train.steps",
    "train.seed": "data_seed random_seed random_state",
    "lora.r": "lora_r lora_rank .rank lora.rank .r",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "lora.dropout",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear lora_attn_modules lora.modules",
    "lora.use_rslora": "rslora peft_use_rslora",
    "lora.use_dora": "dora peft_use_dora",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.base": "model.quantization load_in_4bit load_in_8bit bnb_4bit_quant_type quantization_bit "
    "quantize_base qlora fp8_base",
    "lora.target_parameters": "lora_target_parameters",
    "lora.adapter": "adapter_name_or_path lora_model_dir",
    "optim.learning_rate": "lr peak_lr max_lr",
    "optim.lr_scheduler_type": "lr_scheduler scheduler lr_schedule scheduler_type lr_decay_style optim.schedule",
    "optim.warmup_steps": "warmup_ratio num_warmup_steps warmup lr_warmup_steps",
    "optim.weight_decay": "wd decay",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.moments": "optim_bits optimizer_bits optimizer_state_dtype optim_state_dtype",
    "optim.loss_scale": "init_scale initial_loss_scale initial_scale_power loss_scale_init",
    "optim.loss_scale_steps": "loss_scale_window growth_interval scale_window",
    "optim.max_grad_norm": "gradient_clipping clip_grad_norm gradient_clip_val grad_clip max_norm clip_grad optim.clip",
    "engine.devices": "device gpus num_gpus n_gpu n_gpus gpu_ids cuda_visible_devices nproc_per_node num_processes",
    "engine.vram_limit": "gpu_memory_limit max_gpu_memory vram",
    "engine.host_limit": "cpu_memory_limit max_cpu_memory ram_limit",
    "engine.optimizer_threads": "num_threads omp_num_threads cpu_threads",
    "engine.fp8": "float8 enable_fp8 use_fp8 fp8_training",
    "engine.fp16_accumulation": "allow_fp16_accumulation fp16_accumulate",
    "engine.reduce_dtype": "communication_data_type grad_reduce_in_fp32",
    "engine.trace": "profile profiler",
    "save.output_dir": "save.path save.dir save.folder output_path",
    "save.save_steps": "save_every save_every_n_steps checkpoint_every checkpoint_steps save_interval save_strategy "
    "saves_per_epoch save.every save.interval",
    "save.save_total_limit": "keep_last_n_checkpoints max_checkpoints save.limit save.keep",
    "save.load_best_model_at_end": "save_best keep_best load_best_model save_best_model",
    "save.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "data.val_size": "val_set_size eval_split_ratio validation_split",
    "data.val.path": "test_datasets val_sets eval_datasets eval_dataset",
    "train.eval_steps": "eval_every eval_interval evaluation_steps eval_strategy evaluation_strategy evals_per_epoch "
    "eval.every eval.interval",
    "train.early_stopping_patience": "patience",
    "log.report_to": "wandb use_wandb tensorboard trackio metric_logger plot_loss",
    "log.project": "wandb_project",
    "log.logging_steps": "log_every_n_steps log_interval log_every log_steps logging_strategy log.steps "
    "log.every log.interval",
    "log.run_name": "experiment_name wandb_name exp_name log.name",
}
_CANONICAL = {alias: key for key, aliases in ALIASES.items() for alias in aliases.split()}

# Names that other trainers have for our tables.
_TABLES = {
    name: table
    for table, names in {
        "data.train": "dataset datasets train_dataset train_datasets data.dataset data.datasets",
        "data.val": "test_datasets eval_dataset eval_datasets val_sets eval.sets eval.dataset eval.datasets "
        "eval.data data.eval data.test data.valid data.validation validation",
        "train": "training trainer training_args training_arguments",
        "optim": "optimizer optimiser",
        "lora": "peft peft_config lora_config",
        "engine": "hardware",
        "save": "checkpoint checkpoints checkpointing",
        "eval": "evaluation",
        "log": "logging logger",
    }.items()
    for name in names.split()
}
# Keys whose names mean something else in other tables.
_GENERIC = {"path", "format", "split", "weight", "init", "hold", "method", "r", "base", "adapter", "update", "trace"}

# Words of many meanings, which misspell no key.
_VAGUE = {"type", "name", "mode", "kind", "size", "file", "dir", "value"}

# Words without a key of the same meaning, and what to write instead. A word that ends in "*" matches every word that
# starts with it.
ADVICE = {
    word: advice
    for words, advice in {
        "gradient_accumulation_steps gradient_accumulation grad_accum": "it follows from "
        "`train.global_batch_size` / `train.micro_batch_size`",
        "train_on_inputs train_on_input train_on_prompt": "use the opposite, `data.assistant_only_loss`",
        "stage": 'remove it for sft; for pt, set `data.train.format` to "text"; other stages are not available',
        "unfrozen_parameters": "use the opposite, `train.freeze`",
        "double_quant": "it was removed; a run that has it set can only be resumed by the version of rptrain that "
        "began it",
        "dataset_text_field text_column text_field": 'use `data.columns`, such as columns = {text = "body"}',
        "field_* prompt_column response_column completion_column input_column output_column": "use `data.columns`, "
        'such as columns = {instruction = "question", output = "answer"}',
        "completion_only_loss train_on_responses_only": "use `data.assistant_only_loss`",
        "interleave_probs mix_strategy interleave_strategy probabilities": "use `data.train.weight`, "
        "how often a set is used per epoch",
        "overwrite_output_dir": 'use `save.resume = "never"`, which starts a new run and keeps the old one',
        "max_samples max_train_samples": "set `data.train.weight` below 1 to use a part of the data per epoch, or "
        "`train.max_steps`",
        "gradient_checkpointing activation_checkpointing enable_activation_checkpointing use_gradient_checkpointing "
        "gradient_checkpointing_kwargs enable_activation_offloading activation_offloading": "not needed: "
        "rptrain always recomputes and offloads activations",
        "fp16_opt_level fp16_backend half_precision_backend": 'not needed: set `model.dtype = "float16"`',
        "deepspeed fsdp fsdp_config fsdp_version accelerator_config fsdp_cpu_offload": "not needed: "
        "rptrain always keeps the model in host memory; `engine.devices` names the GPUs",
        "flash_attention flash_attn attn_implementation sdp_attention use_flash_attention_2 xformers_attention": "not "
        "needed: rptrain chooses its attention kernel",
        "use_liger_kernel enable_liger_kernel liger_* use_unsloth unsloth_* lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel torch_compile compile tf32 plugins": "not needed: rptrain has its own kernels",
        "trust_remote_code tokenizer_type model_type": "not needed: the architecture is read from config.json, and no "
        "code of models is run",
        "dataloader_* preprocessing_num_workers dataset_num_proc dataset_processes overwrite_cache streaming "
        "remove_unused_columns group_by_length pad_to_sequence_len": "not needed: rptrain reads, caches and batches "
        "the data itself",
        "device_map low_cpu_mem_usage ddp_* local_rank do_train save_safetensors disable_tqdm "
        "logging_first_step task_type peft_type inference_mode": "not needed: remove it",
        "special_tokens tokens add_tokens resize_vocab eos_token pad_token padding_side": "set them in the files of "
        "the model's tokenizer",
        "eval.batch_size": "not needed: `train.micro_batch_size` is used in evaluation, too",
        "min_lr cosine_min_lr_ratio": "the learning rate falls to 0 with the `optim.lr_scheduler_type` cosine or "
        "linear, and stays as it is with constant",
        "wandb_entity wandb_watch wandb_log_model wandb_mode": "set it as an environment variable of wandb, such as "
        "WANDB_ENTITY",
        "rope_scaling rope_theta": "set it in the model's config.json",
        "revision model_revision": "name the folder that `rptrain download --revision` prints as `model.path`",
        "push_to_hub hub_*": "use `rptrain push RUN OWNER/NAME` after training",
    }.items()
    for word in words.split()
}

# Features that rptrain does not have, with words as above.
UNAVAILABLE = {
    word: feature
    for feature, words in {
        "LoRA on layers by number": "peft_layers_to_transform layers_to_transform lora_layers",
        "another initialization of adapters": "init_lora_weights pissa_init loftq_config peft_init_lora_weights "
        "lora.init",
        "training of biases with adapters": "bias lora_bias",
        "double quantization": "bnb_4bit_use_double_quant double_quantization use_double_quant",
        "a choice of how weights are quantized": "quantization quantization_* bnb_4bit_* use_bnb",
        "a choice of optimizer": "optimizer optim optim_args optimizer_type optimizer_in_bwd use_galore use_badam "
        "optim_target_modules momentum nesterov",
        "another metric for the best model than the loss": "metric_for_best_model greater_is_better",
        "another batch size for evaluation": "per_device_eval_batch_size eval_batch_size",
        "another packing for validation": "eval_packing eval_sample_packing",
        "a checkpoint without optimizer state": "save_only_model",
        "a learning rate for some of the weights": "embedding_learning_rate embedding_lr loraplus_lr_ratio lr_groups",
        "another parameter of the learning rate schedule": "lr_scheduler_kwargs cosine_constant_lr_ratio "
        "lr_scheduler_args",
        "another name for the fields of messages": "message_property_mappings message_field_* role_tag content_tag "
        "user_tag assistant_tag system_tag observation_tag function_tag tags",
        "a choice of turns to train on": "mask_history roles_to_train train_on_eos train_on_eot",
        "a tracker other than those of log.report_to": "mlflow_* swanlab_* comet_* logging_dir",
        "regularization of the loss": "label_smoothing_factor label_smoothing neftune_noise_alpha "
        "noisy_embedding_alpha dropout",
        "preference and reinforcement learning": "rl dpo_* kto_* grpo_* pref_* beta reward_*",
    }.items()
    for word in words.split()
}

# Names of optimizers, as values of any key, that are settings here.
_SMALL_MOMENTS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")

# Values that other trainers have, and what to write here.
VALUES = {
    (key, value): advice
    for key, advised in {
        "train.method": {
            "qlora": 'write "lora", and lora.base = "nf4"',
            "adapter peft": 'write "lora"',
            "sft": 'write "full", or "lora" for adapters',
            "freeze": 'write "full", and name tensors in train.freeze',
        },
        "model.dtype": {"bf16": 'write "bfloat16"', "fp16 half": 'write "float16"', "fp32 float": 'write "float32"'},
        "lora.base": {
            "4 4bit int4 fp4": 'write "nf4" for 4 bits',
            "8 8bit": 'write "int8" for 8 bits',
            "bfloat16 float16 float32 fp16 fp32 none": 'write "bf16" to keep model.dtype',
        },
        "optim.moments": {"8bit 8": 'write "int8"', "bfloat16": 'write "bf16"', "float32": 'write "fp32"'},
        "data.train.format": {
            "chat_template chatml conversational openai chat": 'write "messages"',
            "conversations": 'write "sharegpt"',
            "instruction": 'write "alpaca"',
            "completion raw pretrain pretraining": 'write "text"',
        },
        "save.resume": {"true": 'write "auto"', "false": 'write "never"'},
    }.items()
    for values, advice in advised.items()
    for value in values.split()
}

# Names that are switched on, and the value that they stand for.
_SWITCHES = {"load_in_4bit": "4bit", "qlora": "4bit", "load_in_8bit": "8bit", "bf16": "bf16", "fp16": "fp16"}

_KEYS = [*keys(), "data.train", "data.val"]
_KEY = re.compile("`([a-z_.]+)(?: = [^`]*)?`")


def other_names() -> dict[str, tuple[str, ...]]:
    """The names of each key in other trainers, and those that it replaces, by the first key of their advice."""
    names = {key: [alias for alias in aliases.split() if "." not in alias] for key, aliases in ALIASES.items()}
    for word, advice in ADVICE.items():
        if found := _KEY.search(advice):
            names.setdefault(found[1], []).append(word)
    return {key: tuple(words) for key, words in names.items() if key in keys()}


def keys_in(message: str) -> list[str]:
    """The keys that a message names in backticks."""
    return _KEY.findall(message)


def answer(dotted: str, value: object = None) -> str:
    """The suggestion for the unknown key `dotted`, written without array indices, with this value or table."""
    if isinstance(value, str) and value.lower().replace("-", "_") in _SMALL_MOMENTS:
        return 'use `optim.moments = "int8"`'
    section, _, leaf = dotted.lower().replace("-", "_").rpartition(".")
    table = _TABLES.get(section, section)
    inside, names = f"{table}.{leaf}".lstrip("."), (dotted, f"{table}.{leaf}", leaf)
    siblings = [key for key in _KEYS if key.startswith(f"{table}.") and key.count(".") == table.count(".") + 1]
    if section.rpartition(".")[2] == "columns":
        return ADVICE["field_*"]
    if advice := _first(ADVICE, names):
        return advice
    if inside in _KEYS:
        return f"use `{inside}`"
    if (named := _TABLES.get(inside)) in _KEYS:
        return f"use `{named}`"
    if key := next((_CANONICAL[name] for name in names if name in _CANONICAL), None):
        key = key.replace("data.train.", f"{table}.") if table == "data.val" else key
        return f"use `{key}`{_with_value(key, leaf, value)}"
    if key := _misspelled(leaf, siblings, 1):
        return f"did you mean `{key}`?"
    if feature := _first(UNAVAILABLE, (*names, *_unknown_tables(section))):
        return f"{feature} is not available in this version"
    if key := _elsewhere(table, leaf):
        return f"use `{key}`"
    if leaf not in _VAGUE and (key := _misspelled(leaf, siblings) or _misspelled(leaf, _distinct())):
        return f"did you mean `{key}`?"
    if not siblings and (near := typo_of(table, [*Config.model_fields, "data.train", "data.val"])):
        return f"did you mean the table [{near}]?"
    if siblings:
        return f"[{table}] has: {', '.join(key.removeprefix(f'{table}.') for key in siblings)}"
    return f"the tables are: {', '.join(f'[{name}]' for name in Config.model_fields)}"


def answer_value(key: str, value: object) -> str | None:
    """What to write in place of the value of a key, written without array indices, that means something to another
    trainer; None for other values.
    """
    word = str(value).lower()
    return VALUES.get((key.replace("data.val.", "data.train."), word))


def _with_value(key: str, leaf: str, value: object) -> str:
    """What to write for a value that another trainer gives under another name."""
    if value is True and leaf in _SWITCHES:
        value = _SWITCHES[leaf]
    advice = None if value is None else answer_value(key, value)
    return f": {advice}" if advice else ""


def _unknown_tables(section: str) -> list[str]:
    return [part for part in section.split(".") if part not in Config.model_fields]


def _elsewhere(table: str, leaf: str) -> str | None:
    """The key with this name in another table, or with the table's name before it: `eval.steps` is
    `train.eval_steps`.
    """
    wanted = {leaf, f"{table}_{leaf}"}
    return next((key for key in _distinct() if key.rpartition(".")[2] in wanted), None)


def _distinct() -> Iterator[str]:
    """The keys whose names mean the same in every table."""
    return (key for key in keys() if key.rpartition(".")[2] not in _GENERIC)


def _misspelled(leaf: str, known: Iterable[str], most: int = 2) -> str | None:
    """The key that a name misspells, with at most `most` edits."""
    names = {key.rpartition(".")[2]: key for key in known}
    near = typo_of(leaf, names)
    return names[near] if near and edits(leaf, near) <= most else None


def _first(words: dict[str, str], names: Sequence[str]) -> str | None:
    for name in names:
        for known, text in words.items():
            if name == known or (known.endswith("*") and name.startswith(known[:-1])):
                return text
    return None
