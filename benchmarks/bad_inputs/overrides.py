"""Values and keys on the command line, checked with --dry-run or in a run."""

from collections.abc import Iterator

from benchmarks.bad_inputs.case import CHECK, PLAN, TRAIN, Case, Outcome

AREA = "overrides"

# Number of the first, and values that are refused when the config is checked; the message names the key.
VALUES: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (0, "train.micro_batch_size", ("true", "1.5", '"1"')),
    (3, "train.max_steps", ("-1", "0", "99999999999999999999", "inf", "nan")),
    (8, "train.seed", ("-1", "1e400")),
    (10, "train.num_epochs", ("-inf", "1e7")),
    (12, "train.global_batch_size", ("[]", "{}", "1979-05-27")),
    (15, "optim.learning_rate", ("-1", "-0.0", "1e400", "abc")),
    (19, "optim.betas", ("[1,1]", "[0.9,0.9,0.9]", "0.9")),
    (22, "optim.eps", ("0",)),
    (23, "optim.loss_scale", ("3",)),
    (24, "optim.max_grad_norm", ("-1",)),
    (25, "optim.weight_decay", ("inf",)),
    (26, "optim.warmup_steps", ("-0.1", "3.5")),
    (28, "optim.lr_scheduler_type", ("cosin",)),
    (29, "data.max_length", ("2.0", "0")),
    (31, "data.val_size", ("-1", "nan")),
    (33, "data.overlong", ("Truncate",)),
    (34, "engine.devices", ("cpu:0", "cpu:99999", "cpu:-1", "[]", '["cpu","cuda"]', "cuda:")),
    (40, "engine.vram_limit", ("-5GiB", "0B", "1e9GiB", "NaNGiB")),
    (44, "engine.host_limit", ("99999999999999999999GiB",)),
    (45, "engine.stall_timeout", ("1e308", "nan")),
    (47, "engine.optimizer_threads", ("0",)),
    (48, "engine.round_size", ("0",)),
    (49, "save.save_total_limit", ("0",)),
    (50, "save.save_steps", ("-1",)),
    (51, "save.resume", ('""',)),
    (52, "save.output_dir", ('""',)),
    (53, "log.run_name", ('""', '".."', '"../x"', '"a/b"', ".hidden")),
    (58, "log.report_to", ('["nosuch"]', "tensorboard")),
    (60, "log.logging_steps", ("0",)),
    (61, "lora.r", ("0", "-4")),
    (63, "lora.lora_alpha", ("nan", "0")),
    (65, "lora.lora_dropout", ("1",)),
    (66, "lora.target_modules", ("5", "[]", '""')),
    (69, "model.path", ('""', "5")),
    (71, "model.dtype", ("int8",)),
    (72, "model.init", ("zeros",)),
    (73, "model.hold", ("map",)),
    (74, "data.train", ("[]",)),
    (75, "data.train.5.path", ("x",)),
    (76, "data.train.weight", ("1",)),
    (77, "data.train.0.weight", ("0", "-1", "nan", "1e300")),
    (81, "data.train.0", ("x",)),
    (82, "", ("5",)),
    (83, "a", ("",)),
    (84, "..", ("5",)),
    (85, "train..seed", ("1",)),
    (86, "train.", ("1",)),
    (87, "train", ("5",)),
    (88, "train.seed.x", ("1",)),
    (89, "model", ("{}",)),
    (125, "model.path", ("~nosuchuser/x",)),
    (173, "eval.questions", ("100001",)),
)
NINES = "9" * 5000
LONG = "x" * 5000

# Number, name, override, outcome, and what a refusal names; checked with --dry-run.
CHECKED: tuple[tuple[int, str, str, Outcome, str], ...] = (
    (90, "index of 5,000 digits", f"data.train.{NINES}.path=x", "refused", "data.train"),
    (91, "key of 5,000 digits", f"train.{NINES}=1", "refused", "train"),
    (92, "digit that is no index", "data.train.²=1", "refused", "data.train"),
    (93, "Arabic index", "data.train.٠.path=data.jsonl", "either", "data.train"),
    (94, "CPU workers of 5,000 digits", f"engine.devices=cpu:{NINES}", "refused", "engine.devices"),
    (95, "GPU of 5,000 digits", f"engine.devices=cuda:{NINES}", "refused", "engine.devices"),
    (96, "Arabic number of CPU workers", "engine.devices=cpu:1٣", "either", "engine.devices"),
    (97, "value of 5,000 digits", f"train.max_steps={NINES}", "refused", "train.max_steps"),
    (98, "key of 2,000 parts", "a." * 2000 + "a=1", "refused", "a.a"),
    (99, "key of 30,000 parts", "a." * 30000 + "a=1", "refused", "a.a"),
    (100, "index within an index", "data.train.0." * 300 + "path=x", "refused", "data.train"),
    (101, "array 2,000 deep", "train.seed=" + "[" * 2000, "refused", "train.seed"),
    (102, "array 100,000 deep", "train.seed=" + "[" * 100_000, "refused", "train.seed"),
    (103, "table within a table", "train={seed={seed={seed=1}}}", "refused", "train.seed"),
    (106, "key that is not UTF-8", "log.r\udcffn=1", "refused", "log.r"),
    (111, "line end and another key", "train.seed=1\ntrain.max_steps=2", "refused", "train.seed"),
    (112, "line end and a table", 'train.seed=1\n[model]\npath="x"', "refused", "train.seed"),
    (144, "weight of 10**9", "data.train.0.weight=1e9", "either", "weight"),
    (145, "weight of 10**5", "data.train.0.weight=1e5", "either", "weight"),
)

# The same for values that only a run can judge.
RUN: tuple[tuple[int, str, str, Outcome, str], ...] = (
    (104, "null character", 'log.run_name="a\\u0000b"', "refused", "log.run_name"),
    (105, "value that is not UTF-8", "log.run_name=\udcff\udcfe", "refused", "log.run_name"),
    (107, "folder that is not UTF-8", "save.output_dir=o\udcff", "either", "save.output_dir"),
    (108, "line end in a name", 'log.run_name="a\\nb"', "either", "log.run_name"),
    (109, "carriage return in a name", 'log.run_name="a\\rb"', "either", "log.run_name"),
    (110, "escape sequence in a name", 'log.run_name="\\u001b[31mred"', "either", "log.run_name"),
    (113, "line end in text", "log.run_name=a\nb", "either", "log.run_name"),
    (114, "name like an option", "log.run_name=-rf", "either", "log.run_name"),
    (115, "name of a device of another system", "log.run_name=con", "either", "log.run_name"),
    (116, "name of a space", 'log.run_name=" "', "either", "log.run_name"),
    (117, "name that ends with a dot", 'log.run_name="x."', "either", "log.run_name"),
    (118, "name of 300 bytes", "log.run_name=" + "x" * 300, "refused", "log.run_name"),
    (119, "name of 254 bytes", "log.run_name=" + "x" * 254, "either", "log.run_name"),
    (120, "emoji as a name", "log.run_name=😀", "taken", ""),
    (121, "right-to-left override in a name", 'log.run_name="\\u202egpj.exe"', "either", "log.run_name"),
    (122, "device as output folder", "save.output_dir=/dev/full", "refused", "/dev/full"),
    (123, "output folder in /proc", "save.output_dir=/proc/x", "refused", "/proc/x"),
    (124, "output folder of an unknown user", "save.output_dir=~nosuchuser/x", "either", "save.output_dir"),
    (126, "model of an unknown user", "model.path=~nosuchuser/x", "refused", "model.path"),
    (127, "model as a pattern", "model.path=a/*", "refused", "a/*"),
    (128, "model as an address", "model.path=https://huggingface.co/x/y", "refused", "huggingface.co/x/y"),
    (129, "model name of 5,000 characters", f"model.path={LONG}", "refused", "model"),
    (130, "model path of 2,000 parts", "model.path=" + "x/" * 2000, "refused", "model"),
    (131, "cache folder of an unknown user", "data.cache_dir=~nosuchuser/x", "either", "data.cache_dir"),
    (132, "cache folder that is a file", "data.cache_dir=data.jsonl", "refused", "data.cache_dir"),
    (133, "cache folder in /proc", "data.cache_dir=/proc/x", "refused", "data.cache_dir"),
    (134, "template with a broken statement", "data.chat_template={% for", "refused", "template"),
    (135, "template that is missing", "data.chat_template=nope.jinja", "refused", "nope.jinja"),
    (136, "template that is a folder", "data.chat_template=model", "refused", "data.chat_template"),
    (137, "template name of 5,000 characters", f"data.chat_template={LONG}", "refused", "data.chat_template"),
    (138, "resume of /etc", "save.resume=/etc", "refused", "/etc"),
    (139, "resume of a null character", 'save.resume="a\\u0000"', "refused", "save.resume"),
    (140, "resume of 5,000 characters", f"save.resume={LONG}", "refused", "x"),
    (142, "tracker that is not installed", 'log.report_to=["tensorboard"]', "refused", "tensorboard"),
    (143, "trackers that are not installed", 'log.report_to=["wandb","trackio"]', "refused", "wandb"),
    (147, "validation set of 10**18", "data.val_size=1e18", "refused", "data.val_size"),
    (148, "validation set of all sequences", "data.val_size=40", "refused", "data.val_size"),
    (149, "batch of 10**9", "train.global_batch_size=1000000000", "refused", "train.global_batch_size"),
    (150, "sequences of 10**9 tokens", "data.max_length=1000000000", "refused", "data.max_length"),
    (151, "logging_steps of 10**30", f"log.logging_steps={10**30}", "either", "log.logging_steps"),
    (152, "save_steps of 10**30", f"save.save_steps={10**30}", "either", "save.save_steps"),
    (153, "seed of 10**30", f"train.seed={10**30}", "either", "train.seed"),
    (154, "seed of 2**63", f"train.seed={2**63}", "either", "train.seed"),
    (155, "seed of 4,000 digits", "train.seed=" + "9" * 4000, "either", "train.seed"),
    (156, "10**9 threads", f"engine.optimizer_threads={10**9}", "either", "engine.optimizer_threads"),
    (157, "10**30 threads", f"engine.optimizer_threads={10**30}", "either", "engine.optimizer_threads"),
    (158, "learning rate of 1e308", "optim.learning_rate=1e308", "diverged", "optim.learning_rate"),
    (159, "weight decay of 1e308", "optim.weight_decay=1e308", "diverged", "optim.weight_decay"),
    (160, "epsilon of 1e308", "optim.eps=1e308", "either", "optim.eps"),
    (161, "smallest epsilon", "optim.eps=5e-324", "either", "optim.eps"),
    (163, "lora_alpha of 1e308", "lora.lora_alpha=1e308", "diverged", "lora.lora_alpha"),
    (164, "rank of 10**9", f"lora.r={10**9}", "refused", ""),
    (165, "rank of 10**30", f"lora.r={10**30}", "refused", "lora.r"),
    (166, "catastrophic expression", "lora.target_modules=(([a-z0-9_.]+)+)+!", "refused", "lora.target_modules"),
    (167, "broken expression", "lora.target_modules=(((", "refused", "lora.target_modules"),
    (168, "huge repetition", "lora.target_modules=(a{1,60000}){1,60000}", "refused", "lora.target_modules"),
    (169, "pattern of many stars", 'train.freeze=["' + "*a" * 40 + '*!"]', "refused", "train.freeze"),
    (170, "empty range of letters", 'train.freeze=["[z-a]*"]', "refused", "train.freeze"),
    (171, "open bracket", 'train.freeze=["[!"]', "refused", "train.freeze"),
    (172, "max_skipped_steps of 10**30", f"optim.max_skipped_steps={10**30}", "either", "optim.max_skipped_steps"),
)


def cases() -> Iterator[Case]:
    for first, key, values in VALUES:
        for number, value in enumerate(values, first):
            override = f"{key}={value}"
            named = key.strip(".").split(".")[0]
            yield Case(number, AREA, override, (*CHECK, override), names=named)
    for number, name, override, expected, named in CHECKED:
        yield Case(number, AREA, name, (*CHECK, override), expected, names=named)
    for number, name, override, expected, named in RUN:
        makes = ("runs", "o\udcff") if number == 107 else None
        yield Case(number, AREA, name, (*TRAIN, override), expected, names=named, makes=makes)
    epochs = ("train.num_epochs=1e6", "train.max_steps=1")
    yield Case(146, AREA, "10**6 epochs", (*TRAIN, *epochs), "either")
    scale = ("model.dtype=float16", f"optim.loss_scale={2.0**1000}")
    yield Case(162, AREA, "loss scale of 2**1000", (*TRAIN, *scale), "diverged", names="optim.loss_scale")
    unknown = ("lora.adapter=~nosuchuser/x", "optim.learning_rate=1e-4")
    yield Case(141, AREA, "adapter of an unknown user", (*TRAIN, *unknown), names="lora.adapter")
    slow = "lora.target_modules=(([a-z0-9_.]+)+)+!"
    yield Case(762, AREA, "catastrophic expression, planned", (*PLAN, slow), names="lora.target_modules")
