"""TRL's trainers, each trained from the same seeds on transformers' engine and on ours.

    python -m programs.parity.trl_trainings [--ranks N] [--ours ARGUMENTS] [NAME ...]

With N ranks each engine is started as torchrun would start it, and the first rank's log
is compared. ARGUMENTS, a dict in JSON, are ours alone: {"fsdp": "full_shard"} compares
with whole models. Prints a table of differences, and ends with 1 where one of ours
fails, differs or enters the loop of transformers. ENGINE [NAME ...], "ours" or
"theirs", prints that one's JSON.

Each trainer runs plain, with LoRA, both resumed from the checkpoint in the middle, with
TRL's defaults (bf16, recomputation), evaluations and an epoch that ends within an
update, twice, and resumed in the same trainer after a failure.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings

from ranks import free_port, torchrun

RANK, RANKS = (int(os.environ.get(n, m)) for n, m in (("RANK", 0), ("WORLD_SIZE", 1)))
PLACES = ("_inner_training_loop", "_run_epoch", "train", "training_step")
VARIANTS = (
    "plain", "peft", "resume", "peft_resume", "defaults", "again", "after_failure"
)  # fmt: skip
# What is measured of time, and the mean loss, which ours resumes.
BOUND = 1e-4  # of differences of losses
BOUND_BF16 = 5e-3  # of ours with other arguments: autocast computes some in float32
# PRM's loss is twice too large there, and IW-OPD's resumed run ends at its checkpoint.
NOT_AS_THERE = (
    "prm", "iw_opd resume", "iw_opd peft_resume", "iw_opd after_failure"
)  # fmt: skip
APART = ("eps", "runtime", "per_second", "time", "perf/", "total_flos", "train_loss")


# ---- Data and models


TEXTS = [f"the quick brown fox number {i} " + "runs far " * (i % 3) for i in range(32)]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer():
    """Of bytes: GOLD takes no other."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<eos>", "<user>", "<assistant>"]
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=299, special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>",
        eos_token="<eos>", chat_template=TEMPLATE, padding_side="left",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip


def language_model(folder, seed=0, **options):
    """A model of a file, from which TRL reads references and tokenizers."""
    import torch
    from safetensors.torch import save_model
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
    )

    cls = {1: LlamaForSequenceClassification, 2: LlamaForTokenClassification}.get(
        options.get("num_labels"), LlamaForCausalLM
    )
    torch.manual_seed(seed)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, pad_token_id=1, eos_token_id=2,
        bos_token_id=2, **options,
    )  # fmt: skip
    place = f"{folder}/of_rank{RANK}/{seed}"
    os.makedirs(place, exist_ok=True)
    config.architectures = [cls.__name__]
    config.save_pretrained(place)  # a model's writes on the first rank alone
    save_model(cls(config), f"{place}/model.safetensors", {"format": "pt"})
    words.save_pretrained(place)
    return cls.from_pretrained(place)


def message(role, text):
    return [{"role": role, "content": text}]


CHATS = [message("user", a) + message("assistant", "fox runs") for a in TEXTS]
ANSWERS = {"chosen": ["quick fox far"] * 32, "rejected": ["number brown"] * 32}
PAIRS = {"prompt": TEXTS, **ANSWERS}
LABELED = {
    "prompt": TEXTS, "completion": ["quick fox", "number far runs"] * 16,
    "label": [True, False] * 16,
}  # fmt: skip
TOLD = {"prompt": TEXTS, "privileged_context": ["fox runs far"] * 32}


def different_letters(completions, **rest):
    return [float(len(set(text))) for text in completions]


def odd(completions, **rest):
    return [float(len(text) % 2) for text in completions]


# ---- Trainers: class, module, rows, options of the config, keywords of the trainer


def teacher(folder):
    return {"teacher_model": language_model(folder, seed=1)}


def reward(function):
    return lambda folder: {"reward_funcs": function}


def reference(folder):
    return {"ref_model": language_model(folder), "reward_funcs": different_letters}


class Rollouts:
    """In place of vLLM's server: the samples of an asynchronous trainer."""

    def __init__(self, sample):
        import queue

        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.sample = sample

    def start(self):
        for i in range(100):
            self.rollout_buffer.put(self.sample(i))

    def __getattr__(self, name):  # of a worker, and of a transfer of weights
        return lambda *args, **kwargs: None


def sampled(module, **more):
    """Rollouts of the module's class of samples."""
    import importlib

    import numpy
    import torch

    torch.cuda.get_device_name = lambda device: "CPU"  # it asks without a GPU, too
    module = f"trl.experimental.{module}.async_rollout_worker"
    cls = importlib.import_module(module).RolloutSample

    def sample(i):
        draw, n = numpy.random.default_rng(i), 8 + i % 3
        own = {name: make(draw, n, i) for name, make in more.items()}
        return cls(
            prompt=message("user", TEXTS[0]), completion=message("assistant", "fox"),
            input_ids=draw.integers(5, 200, n), model_version=10**6, metrics={},
            completion_mask=numpy.arange(n) > 3, **own,
        )  # fmt: skip

    rollouts = Rollouts(sample)
    return {"rollout_worker": rollouts, "weight_transfer": rollouts}


def async_grpo(folder):
    import types

    import torch
    from trl.experimental.async_grpo import packing

    def attention(q, k, v, starts, stops, *rest, softmax_scale, **options):
        """Causal attention to the end of each of the keys' segments."""
        parts = []
        for i in range(len(starts) - 1):
            own, keys = q[starts[i] : starts[i + 1]], slice(stops[i], stops[i + 1])
            n, m = len(own), stops[i + 1] - stops[i]
            mask = torch.ones(n, m).tril(m - n).bool()
            scores = torch.einsum("qhd,khd->hqk", own, k[keys]) * softmax_scale
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v[keys]))
        return torch.cat(parts)

    flash = types.SimpleNamespace(flash_attn_varlen_func=attention)
    packing._flash_attn = lambda: flash
    return {
        "reward_funcs": odd,
        **sampled(
            "async_grpo", old_log_probs=lambda draw, n, i: -draw.random(n),
            advantage=lambda draw, n, i: float(draw.normal()),
            group_id=lambda draw, n, i: i // 4,
        ),
    }  # fmt: skip


def async_distillation(folder):
    import numpy

    return sampled(
        "async_distillation", teacher_id=lambda draw, n, i: "teacher",
        teacher_topk_ids=lambda draw, n, i: draw.integers(5, 200, (n, 3)),
        teacher_topk_logprobs=lambda draw, n, i: numpy.log(draw.random((n, 3)) / 4),
        prompt_id=lambda draw, n, i: i,
    )  # fmt: skip


def served(folder):
    """The teacher behind what its client asks of vLLM's server."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    import torch
    from trl.generation import vllm_client

    model = language_model(folder, seed=1).eval()

    def scored(tokens, n, temperature):
        """The n likeliest tokens of each place but the first, and the one there."""
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0] / temperature
        places = [None]
        for token, row in zip(tokens[1:], logits.log_softmax(-1), strict=False):
            order = row.argsort(descending=True).tolist()
            ranks = {one: order.index(one) + 1 for one in (*order[:n], token)}
            places.append(
                {
                    str(one): {"logprob": float(row[one]), "rank": rank}
                    for one, rank in ranks.items()
                }
            )
        return {"prompt_logprobs": places}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "teacher"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            how = asked["prompt_logprobs"], asked["temperature"]
            found = [scored(tokens, *how) for tokens in asked["prompt"]]
            self.answer({"choices": found})

        def answer(self, value):
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    vllm_client.is_vllm_available = lambda *args, **kwargs: True  # the client is HTTP
    return {"teacher_model_server_url": f"http://127.0.0.1:{server.server_port}"}


def judged(folder):
    critic = language_model(folder, seed=2, num_labels=1)
    return {"ref_model": language_model(folder), "reward_funcs": critic}


def critics(folder):
    return {
        "reward_model": language_model(folder, seed=2, num_labels=1),
        "value_model": language_model(folder, seed=3, num_labels=1),
        "ref_model": None,
    }


GROUPS = dict(num_generations=4, max_completion_length=6)
SHORT = dict(max_length=24, max_completion_length=6)
TRAINERS = {
    "sft": ("SFT", "trl", {"messages": CHATS}, dict(max_length=24), None),
    "dpo": ("DPO", "trl", PAIRS, {}, None),
    "kto": ("KTO", "trl", LABELED, {}, None),
    "reward": ("Reward", "trl", ANSWERS, {}, None),
    "grpo": ("GRPO", "trl", {"prompt": TEXTS}, GROUPS, reward(different_letters)),
    "rloo": ("RLOO", "trl", {"prompt": TEXTS}, GROUPS, reward(different_letters)),
    "distillation": (
        "Distillation", "trl", {"prompt": [c[:1] for c in CHATS]},
        dict(max_completion_length=6), teacher,
    ),
    "orpo": ("ORPO", "orpo", PAIRS, dict(max_length=24), None),
    "cpo": ("CPO", "cpo", PAIRS, dict(max_length=24), None),
    "tpo": ("TPO", "tpo", {**PAIRS, "reference": ["fox runs"] * 32}, {}, None),
    "online_dpo": (
        "OnlineDPO", "online_dpo", {"prompt": TEXTS}, dict(max_new_tokens=6),
        reference,
    ),
    "gkd": (
        "GKD", "gkd", {"messages": CHATS}, dict(max_length=24, max_new_tokens=6),
        teacher,
    ),
    "gold": ("GOLD", "gold", {"messages": CHATS}, SHORT, teacher),
    "iw_opd": ("IWOPD", "iw_opd", {"messages": CHATS}, SHORT, teacher),
    "gmpo": ("GMPO", "gmpo", {"prompt": TEXTS}, GROUPS, reward(different_letters)),
    "a2po": (
        "A2PO", "a2po", {"prompt": TEXTS}, dict(max_completion_length=6),
        reward(odd),
    ),
    "sdft": ("SDFT", "sdft", TOLD, {**GROUPS, "distillation_topk": 10}, None),
    "sdpo": ("SDPO", "sdpo", {"prompt": TEXTS}, GROUPS, reward(different_letters)),
    "async_grpo": (
        "AsyncGRPO", "async_grpo", {"prompt": TEXTS}, dict(token_budget=0), async_grpo,
    ),
    "async_distillation": (
        "AsyncDistillation", "async_distillation", {"prompt": TEXTS},
        dict(token_budget=0, model_init_kwargs={"attn_implementation": "eager"}),
        async_distillation,
    ),
    "server_distillation": (
        "ServerDistillation", "server_distillation",
        {"prompt": [c[:1] for c in CHATS]}, dict(max_completion_length=6), served,
    ),
    # Of TRL 0.29
    "bco": ("BCO", "bco", LABELED, dict(max_length=24), None),
    "xpo": ("XPO", "xpo", {"prompt": TEXTS}, dict(max_new_tokens=6), judged),
    "nash_md": (
        "NashMD", "nash_md", {"prompt": TEXTS}, dict(max_new_tokens=6), judged
    ),
    "minillm": ("MiniLLM", "minillm", {"prompt": TEXTS}, GROUPS, teacher),
    "gfpo": (
        "GFPO", "gfpo", {"prompt": TEXTS}, {**GROUPS, "num_remains_in_group": 2},
        lambda folder: {
            "reward_funcs": different_letters,
            "group_filter_func": lambda groups, rewards: rewards,
        },
    ),
    "grpo_with_replay_buffer": (
        "GRPOWithReplayBuffer", "grpo_with_replay_buffer", {"prompt": TEXTS}, GROUPS,
        reward(different_letters),
    ),
    "prm": (
        "PRM", "prm",
        {
            "prompt": TEXTS, "completions": [["fox", "runs"]] * 32,
            "labels": [[True, False]] * 32,
        }, dict(max_length=24), None,
    ),
    "ppo": (
        "PPO", "ppo", {"input_ids": [[5 + i, 9, 11, 7] for i in range(32)]},
        dict(response_length=6, total_episodes=32, num_mini_batches=1), critics,
    ),
    "bema_dpo": ("DPO", "bema_for_ref_model", PAIRS, {}, None),
}  # fmt: skip


# ---- One engine


def count_calls():
    """Calls of transformers' own Trainer from here on, by method."""
    from transformers import Trainer

    calls = dict.fromkeys(PLACES, 0)

    def counted(name, method):
        def call(*args, **kwargs):
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name in PLACES:
        setattr(Trainer, name, counted(name, getattr(Trainer, name)))
    return calls


def trained(name, variant, folder):
    """The log of one training; the checkpoint is that of the unresumed one."""
    import importlib

    import torch
    from datasets import Dataset
    from fails_once import FailsOnce
    from peft import LoraConfig
    from transformers import set_seed
    from trl import DPOConfig

    from ctrainer.trainer import Trainer

    set_seed(7)  # PPO does not
    prefix, module, rows, options, more = TRAINERS[name]
    module = importlib.import_module(
        module if module == "trl" else f"trl.experimental.{module}"
    )
    trainer = getattr(module, f"{prefix}Trainer")
    config = getattr(module, f"{prefix}Config", None) or DPOConfig
    output = f"{folder}/{variant.removesuffix('_resume').replace('resume', 'plain')}"
    shared = dict(
        gradient_accumulation_steps=2, max_steps=4, save_steps=2, bf16=False, seed=7,
        per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2,
        report_to=[], use_cpu=True, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    keywords = more(folder) if more else {}
    data = Dataset.from_dict(rows)
    if RANKS > 1:
        shared |= dict(per_device_train_batch_size=2, ddp_timeout=120)
    if issubclass(trainer, Trainer):
        shared |= json.loads(os.environ.get("ARGUMENTS_OF_OURS", "{}"))
    if variant == "defaults":
        del shared["bf16"], shared["gradient_checkpointing"]
        shared |= dict(max_steps=6, save_strategy="no")
        if not name.startswith("async"):
            shared |= dict(
                eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4
            )
            keywords["eval_dataset"] = data.select(range(20, 32))
        data = data.select(range(20))
    if "teacher_model_server_url" in keywords:
        url = keywords.pop("teacher_model_server_url")
        options = {**options, "teacher_model_server_url": url}
    args = config(output, **{**shared, **options})
    # torch cannot restore to transformers' "cpu:0"
    if RANKS > 1 and not issubclass(trainer, Trainer):
        vars(args)["_setup_devices"] = torch.device("cpu")
    if "peft" in variant:
        kinds = {"reward": "SEQ_CLS", "prm": "TOKEN_CLS"}
        kind = kinds.get(name, "CAUSAL_LM")
        keywords["peft_config"] = LoraConfig(task_type=kind, r=4, lora_dropout=0.1)
        if name != "ppo":
            keywords.pop("ref_model", None)
    labels = {"reward": {"num_labels": 1}, "prm": {"num_labels": 2}}.get(name, {})
    model = language_model(folder, **labels)
    if name.startswith("async"):
        model = f"{folder}/of_rank{RANK}/0"
    made = trainer(
        model=model, args=args,
        train_dataset=data, processing_class=tokenizer(), **keywords,
    )  # fmt: skip
    last = {"resume_from_checkpoint": f"{output}/checkpoint-2"}
    before = []
    if variant in ("again", "after_failure"):
        made.add_callback(FailsOnce(3 if variant == "after_failure" else -1))
        with contextlib.suppress(ArithmeticError):
            made.train()
        before = made.state.log_history
        assert before[-1]["step"] == (4 if variant == "again" else 2)
    resumed = "resume" in variant or variant == "after_failure"
    made.train(**(last if resumed else {}))
    return type(made).__mro__, before + made.state.log_history


def run(engine, names):
    import torch

    torch.set_num_threads(1)
    calls = count_calls()
    if engine == "ours":
        import ctrainer

        ctrainer.patch_transformers()
    from ctrainer.trainer import Trainer

    found = {}
    for name in names:
        folder = os.environ.get("FOLDER_OF_RANKS") or tempfile.mkdtemp()
        folder = f"{folder}/{name}"
        for variant in VARIANTS:
            before = sum(calls.values())
            try:
                classes, log = trained(name, variant, folder)
                assert (Trainer in classes) == (engine == "ours")
            except Exception as error:
                traceback.print_exc()
                log = f"{type(error).__name__}: {error}"
            found[f"{name} {variant}"] = log, sum(calls.values()) - before
        if RANKS == 1:
            shutil.rmtree(folder)
    print(json.dumps(found))


# ---- Both


def difference(ours, theirs):
    """The largest of the losses, and of all that is logged; None: other entries."""

    def numbers(log, loss):
        return [
            (entry["step"], key, value)
            for entry in log
            for key, value in sorted(entry.items())
            if isinstance(value, int | float)
            and not any(part in key for part in APART)
            and (not loss or key == "loss" or key.startswith("loss/"))
        ]

    for loss in True, False:
        pairs = list(zip(numbers(ours, loss), numbers(theirs, loss), strict=False))
        same = len(numbers(ours, loss)) == len(numbers(theirs, loss))
        if not same or any(a[:2] != b[:2] for a, b in pairs):
            yield None
        else:  # NaN equals NaN
            yield max(
                (abs(a - b) for (*_, a), (*_, b) in pairs if a == a or b == b),
                default=None,
            )


def present():
    """The trainers that this TRL has."""
    from importlib.util import find_spec

    def has(module):
        return module == "trl" or find_spec(f"trl.experimental.{module}")

    return [name for name, (_, module, *_) in TRAINERS.items() if has(module)]


def compare(names, ranks, arguments):
    logs = tempfile.mkdtemp()
    environment = os.environ | dict(
        HF_HUB_OFFLINE="1", CI="1", TRL_EXPERIMENTAL_SILENCE="1",
        TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1",
        ARGUMENTS_OF_OURS=arguments,
    )  # fmt: skip
    started = []
    for engine in ("ours", "theirs"):
        port = free_port()
        for rank in range(ranks):
            of_rank = {"FOLDER_OF_RANKS": f"{logs}/{engine} files"}
            if ranks > 1:
                of_rank |= torchrun(rank, ranks, engine, port)
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", __spec__.name, engine, *names],
                    env=environment | of_rank,
                    stdout=open(f"{logs}/{engine}{rank or ''}.json", "w"),
                    stderr=open(f"{logs}/{engine}{rank or ''}.err", "w"),
                )
            )
    print(f"stderr of both is in {logs}")
    failed = [process.wait() for process in started]
    assert not any(failed), failed
    ours, theirs = (
        json.loads(open(f"{logs}/{engine}.json").read().splitlines()[-1])
        for engine in ("ours", "theirs")
    )
    print("trainer variant: losses, all numbers, calls of transformers' own loop")
    good = True
    for key, (log, calls) in ours.items():
        other, others = theirs[key]
        assert others > 0 or isinstance(other, str) or key.startswith("ppo")
        if isinstance(log, str) or isinstance(other, str):
            texts = (str(each)[:120] for each in (log, other))
            print("{}: ours {}; theirs {}".format(key, *texts))
            good &= isinstance(other, str)
        else:
            loss, every = difference(log, other)
            print(f"{key}: {loss}, {every}, {calls}")
            low = arguments != "{}" and key.endswith(" defaults")
            close = loss is not None and loss <= (BOUND_BF16 if low else BOUND)
            good &= calls == 0 and (close or key.startswith(NOT_AS_THERE))
    return 0 if good else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ours", default="{}", metavar="ARGUMENTS")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.names[:1] in (["ours"], ["theirs"]):
        run(given.names[0], given.names[1:] or TRAINERS)
    else:
        sys.exit(compare(given.names or present(), given.ranks, given.ours))
