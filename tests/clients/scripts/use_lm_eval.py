"""EleutherAI's harness, unchanged, over tasks and data of this folder: choices and texts by their logprobs, and answers."""

import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, MODEL = sys.argv[1:3]
TASKS = TaskManager(include_path=str(Path("lm_eval_tasks").resolve()), include_defaults=False)


def results(model: str, path: str, tasks: list[str], *, apply_chat_template: bool = False, **args: object) -> dict:
    args = {"model": MODEL, "base_url": f"{URL}{path}", "max_retries": 1, "num_concurrent": 2, **args}
    done = simple_evaluate(
        model=model,
        model_args=args,
        tasks=tasks,
        task_manager=TASKS,
        apply_chat_template=apply_chat_template,
        bootstrap_iters=0,
    )
    return done["results"]


# Without a tokenizer of its own, the harness asks the server's.
scores = results(
    "local-completions", "/completions", ["capital_choice", "capital_answer", "capital_text"], batch_size=3
)
assert scores["capital_choice"]["acc,none"] == 1, scores
assert scores["capital_answer"]["exact_match,city"] == 1, scores
assert 1 < scores["capital_text"]["word_perplexity,none"] < 1000, scores

scores = results("local-chat-completions", "/chat/completions", ["capital_answer"], apply_chat_template=True)
assert scores["capital_answer"]["exact_match,city"] == 1, scores
