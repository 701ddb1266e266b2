"""Record the answers to `log.sample_prompts` whenever a run is validated."""

from rptrain.inference.samples import answer_samples
from rptrain.runs.records.events import Sample
from rptrain.train.session import Session
from rptrain.utils.phases import phase
from rptrain.utils.text import one_line


def record_answers(session: Session, step: int) -> None:
    """Record and print the answers of the model after this step. The engine must have applied it, and do nothing.

    The first process answers, with the weights in host memory; the others wait.
    """
    job, main = session.begun.job, session.group.main
    prompts = job.config.log.sample_prompts
    if not prompts:
        return
    with session.doing("evaluating"), main.together():
        if not main.first:
            return
        with phase("answering the sample prompts", unit=""):
            answers = answer_samples(job.spec, session.store.weights, job.tokenizer, job.sample_inputs, job.eos_ids)
    for prompt, text in zip(prompts, answers, strict=True):
        session.begun.log.write(Sample(step, prompt, text))
        session.progress.note(f"step {step}: {one_line(prompt)} -> {one_line(text) or '(no text)'}")
