"""Checks that a report still follows from the records. Recomputes every claim offline and names each difference.

It checks the plan's hash and its rows in SQL, how the study was conducted, verdicts, findings and decisions, every claim's value
and text, and the files byte for byte.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from researcher.analysis.decide import Decision
from researcher.analysis.knowledge import findings_of
from researcher.analysis.metrics import MetricMissing
from researcher.models import SEAL, Claim, Effect, ReportSeal, StudyData, VerdictRecord
from researcher.refusals import RecordsDisagree, UnknownName
from researcher.report.conducted import Difference, alike, conducted, same, shown
from researcher.report.expressions import BadExpression, Evaluator
from researcher.report.page import Page, page
from researcher.report.records import Records, ended_or_went_on
from researcher.report.vocabulary import Value
from researcher.report.writer import (
    PRINTED,
    claims_digest,
    digest,
    marked_claims,
    numbers_in,
    render,
    visible,
    wording,
)

_PROGRESS = ("trial_", "attempt_", "decision", "amended", "repaired")
"""Prefixes of event kinds that change a report."""
_ANSWERS = (".diff", ".low", ".high")
"""Suffixes of the claims that every report must print: effects and both ends of their intervals."""
_REASON = ".reason"
"""Suffix of claims that state a reason in words."""
_MISSING = "the file is missing; `researcher report` rewrites it"


def verify(
    data: StudyData, claims: Sequence[Claim], files: Mapping[str, str], seal: ReportSeal | None = None
) -> list[Difference]:
    """List all differences between report and records; empty when the report holds.

    If another version of this program worded the report, its files must match that version's digests; all numbers are still
    recomputed.

    `claims`, `files` and `seal` are as `write_report` returned them and the store kept them.
    """
    try:
        records = Records(data)
    except RecordsDisagree as error:
        return [Difference(claim="report", problem=f"the report cannot be rebuilt from these records: {error}")]
    if _went_on(data):
        since = Difference(
            claim="report", problem="the study has continued since; `researcher report` rewrites the report"
        )
        return [*_plan(records), since]
    elsewhere = seal is not None and reworded(seal)
    if not elsewhere and ended_or_went_on(data):  # earlier versions wrote the report before the end
        told = "the study has ended or continued since; `researcher report` rewrites the report"
        return [*_plan(records), Difference(claim="report", problem=told)]
    found = [*_plan(records), *_claims(records, claims, elsewhere=elsewhere)]
    try:
        whole = page(records)
        other = elsewhere or _concluded_by_another_version(data)
        concluded = [*_verdicts(records, reworded=other), *_findings(records), *_decisions(records, reworded=other)]
        found += [*conducted(records), *(map(_by_another_version, concluded) if other else concluded)]
        if seal is not None and elsewhere:
            rendered = [visible(text) for kind, (_, text) in render(whole).items() if kind in PRINTED]
            found += _as_sealed(claims, files, seal, [records.plan.canonical(), *rendered])
        else:
            found += [*_completeness(whole, claims), *_files(whole, files, sealed=seal is not None)]
    except (RecordsDisagree, UnknownName) as error:
        found.append(Difference(claim="report", problem=f"the report cannot be rebuilt from these records: {error}"))
    return found


def reworded(seal: ReportSeal) -> bool:
    """True if another version of this program wrote the report, perhaps with different wording."""
    return seal.wording != wording()


def _went_on(data: StudyData) -> bool:
    """True if a trial began, rested or ended, or a decision was made, after the newest report was written."""
    reports = [event.seq for event in data.events if event.kind == "report"]
    return bool(reports) and any(event.seq > reports[-1] and event.kind.startswith(_PROGRESS) for event in data.events)


def _concluded_by_another_version(data: StudyData) -> bool:
    """True if another version wrote the first report after the last decision. The recorded verdicts and decisions then stand."""
    decided = max((event.seq for event in data.events if event.kind == "decision"), default=0)
    first = next((event for event in data.events if event.kind == "report" and event.seq > decided), None)
    if first is None:
        return False
    seal = first.detail.get(SEAL)
    return seal is None or reworded(ReportSeal.model_validate(seal))


def _as_sealed(
    claims: Sequence[Claim], files: Mapping[str, str], seal: ReportSeal, said: Sequence[str]
) -> Iterator[Difference]:
    """Check files against their seal. `said` lists the plan and the report as rendered now; their numbers need not be claims."""
    listed = [f"{claim.expression} {claim.value} {claim.text}" for claim in claims]
    known = {number for text in (*said, *listed, str(len(claims))) for number in numbers_in(text)}
    if claims_digest(claims) != seal.claims:
        yield Difference(claim="report", problem="the claims differ from those stored when the report was written")
    for kind in [*seal.files, *(kind for kind in files if kind not in seal.files)]:
        path = Path(files[kind]) if kind in files else None
        subject = f"file {path.name if path else kind}"
        if path is None:
            problem = "the report was written with this file, but the records do not list it"
            yield Difference(claim=subject, problem=problem)
        elif kind not in seal.files:
            yield Difference(claim=subject, problem="it is not among the files that were written")
        elif not path.is_file():
            yield Difference(claim=subject, problem=_MISSING)
        elif digest(path.read_bytes()) != seal.files[kind]:
            yield Difference(claim=subject, problem="it was changed after writing")
        elif kind in PRINTED:
            yield from _unsaid(claims, kind, path)
            yield from _unheard_of(path, known)


def _unsaid(claims: Sequence[Claim], kind: str, path: Path) -> Iterator[Difference]:
    """Find effects and intervals that the file does not show. Other claims need not appear in it."""
    text = path.read_text(errors="replace")
    for claim in claims:
        if claim.name.endswith(_ANSWERS) and isinstance(claim.value, int | float) and PRINTED[kind](claim) not in text:
            yield Difference(
                claim=claim.name,
                expression=claim.expression,
                reported=claim.text,
                problem=f"{path.name} does not show this value",
            )
    known = {(claim.expression, claim.text) for claim in claims}
    for expression, said in dict.fromkeys(marked_claims(text)):
        if (expression, said) not in known:
            problem = "it is marked as a claim but is not among the report's claims"
            yield Difference(claim=f"file {path.name}", expression=expression, reported=said, problem=problem)


def _unheard_of(path: Path, known: Container[str]) -> Iterator[Difference]:
    """Find lines with a number that is neither in a claim nor in the plan. Another version may word a line differently, but it prints
    the same numbers.
    """
    for at, line in enumerate(visible(path.read_text(errors="replace")).split("\n"), start=1):
        for number in dict.fromkeys(numbers_in(line)):
            if number not in known:
                problem = f"line {at} has a number that is neither in a claim nor in the plan"
                yield Difference(claim=f"file {path.name}", reported=number, problem=problem)


def _plan(records: Records) -> Iterator[Difference]:
    planned, frozen = records.plan.digest(), records.data.plan_hash
    if planned != frozen:
        yield Difference(
            claim="plan", reported=frozen, recomputed=planned, problem="the plan was changed after it was frozen"
        )
    for part, columns in records.data.altered.items():
        for column, stored, wanted in columns:
            problem = f"its {column} in SQL differs from the plan"
            told = {"reported": shown(stored), "recomputed": shown(wanted)}
            yield Difference(claim=part, expression=column, **told, problem=problem)


def _by_another_version(found: Difference) -> Difference:
    """Add to the difference that another version may have caused it, instead of a changed record."""
    problem = f"{found.problem} (a different version of researcher concluded the study, perhaps with different rules)"
    return found.model_copy(update={"problem": problem})


def _claims(records: Records, claims: Sequence[Claim], *, elsewhere: bool) -> Iterator[Difference]:
    """Recompute the claims.

    Claims of single trials come first, because they point to the changed record. `elsewhere`: whether another version computed the
    claims.
    """
    differs = "a different version of researcher computed it; `researcher report` rewrites the report"
    evaluator, stored = Evaluator(records), Evaluator(Records(records.data, believe_finals=True))
    for claim in sorted(claims, key=lambda claim: not claim.name.startswith("trial.")):
        told = {"claim": claim.name, "expression": claim.expression, "reported": claim.value}
        try:
            value = evaluator.value(claim.expression)
        except RecordsDisagree as error:
            yield Difference(**told, recomputed=_as_stored(stored, claim), problem=str(error))
            continue
        except (BadExpression, UnknownName) as error:
            yield Difference(**told, problem=str(error))
            continue
        if elsewhere and claim.name.endswith(_REASON) and _same_but_for_words(claim.value, value):
            continue
        if not same(claim.value, value):
            yield Difference(
                **told, recomputed=value, problem=differs if elsewhere else "the records give a different value"
            )


def _as_stored(evaluator: Evaluator, claim: Claim) -> Value:
    """Return the claim's value from stored finals, even if their series differ; None if it needs the series."""
    try:
        return evaluator.value(claim.expression)
    except (RecordsDisagree, MetricMissing):
        return None


def _completeness(whole: Page, claims: Sequence[Claim]) -> Iterator[Difference]:
    """Check that the report makes all the claims that it must and no others, printed as this version prints them."""
    wanted, kept = {claim.name: claim for claim in whole.claims}, {claim.name: claim for claim in claims}
    for name in [*wanted, *(name for name in kept if name not in wanted)]:
        now, then = wanted.get(name), kept.get(name)
        if now is None or then is None:
            what = (
                "the report makes this claim, but the claim was not stored"
                if then is None
                else "the report makes no such claim"
            )
            one = now or then
            yield Difference(claim=name, expression=one.expression if one else "", problem=what)
        elif now.expression != then.expression:
            problem = f"the report states it as {now.expression}"
            yield Difference(claim=name, expression=then.expression, reported=then.value, problem=problem)
        elif now.text != then.text and same(now.value, then.value):
            yield Difference(
                claim=name,
                expression=now.expression,
                reported=then.text,
                recomputed=now.text,
                problem="it is now printed differently",
            )


def _over(records: Records) -> bool:
    """True if no trial is left to run, so that verdicts and findings must exist."""
    return bool(records.path) and records.path[-1].action != "stage"


def _verdicts(records: Records, *, reworded: bool) -> Iterator[Difference]:
    recorded = {record.hypothesis: record for record in records.data.verdicts}
    for name in recorded.keys() - {now.hypothesis for now in records.conclusions.verdicts}:
        problem = "a verdict is recorded, but the plan has no such hypothesis"
        yield Difference(claim=f"verdict {name}", reported=recorded[name].verdict.value, problem=problem)
    for now in records.conclusions.verdicts:
        then = recorded.get(now.hypothesis)
        subject = f"verdict {now.hypothesis}"
        if then is None:
            if _over(records):
                problem = "the study is over but has no recorded verdict"
                yield Difference(claim=subject, recomputed=now.verdict.value, problem=problem)
        elif then.verdict is not now.verdict or not _reasons_agree(then.reason, now.reason, reworded=reworded):
            yield Difference(
                claim=subject,
                reported=f"{then.verdict}: {then.reason}",
                recomputed=f"{now.verdict}: {now.reason}",
                problem="the recorded verdict does not follow from the trials",
            )
        else:
            if then.sentinels != now.sentinels and not reworded:
                yield Difference(
                    claim=subject,
                    expression="sentinels",
                    reported=", ".join(then.sentinels),
                    recomputed=", ".join(now.sentinels),
                    problem="the recorded sentinels differ from those that fire on the trials",
                )
            yield from _effect(subject, then, now)
            yield from _decided_after(records, subject, now.hypothesis)


def _reasons_agree(then: object, now: str, *, reworded: bool) -> bool:
    return then == now or (reworded and _same_but_for_words(then, now))


def _same_but_for_words(then: object, now: object) -> bool:
    """True if both texts contain the same numbers, in any order."""
    return isinstance(then, str) and isinstance(now, str) and sorted(numbers_in(then)) == sorted(numbers_in(now))


def _decided_after(records: Records, subject: str, hypothesis: str) -> Iterator[Difference]:
    """Check that a hypothesis got exactly one verdict, after the last stage."""
    decided = records.data.decided
    if decided is None or not _over(records):
        return
    stages, last = list(decided.get(hypothesis, ())), records.path[-1].after
    if stages != [last]:
        problem = "expected exactly one verdict, given after the last stage"
        yield Difference(claim=subject, reported=", ".join(stages), recomputed=last, problem=problem)


def _effect(subject: str, then: VerdictRecord, now: VerdictRecord) -> Iterator[Difference]:
    if then.effect is None or now.effect is None:
        if then.effect is not now.effect:
            yield Difference(claim=subject, problem="only one of the recorded and recomputed verdicts has an effect")
        return
    for field in Effect.model_fields:
        old, new = getattr(then.effect, field), getattr(now.effect, field)
        if not same(old, new):
            problem = f"the recorded effect's {field} does not follow from the trials"
            yield Difference(claim=subject, expression=field, reported=old, recomputed=new, problem=problem)


def _findings(records: Records) -> Iterator[Difference]:
    """Check the recorded findings. Later studies quote them without looking at trials."""
    data = records.data
    verdicts = records.conclusions.verdicts if _over(records) else ()
    computed = findings_of(data.study_id, records.plan, verdicts, 0.0, data.trials)
    then, now = ({finding.id: finding for finding in found} for found in (data.findings, computed))
    for name in sorted(then.keys() | now.keys()):
        if name not in then or name not in now:
            problem = "the finding is not recorded" if name not in then else "the study's verdicts give no such finding"
            yield Difference(claim=f"finding {name}", problem=problem)
            continue
        old, new = (
            found[name].model_dump(mode="json", exclude={"at": True, "effect": {"trial_s"}}) for found in (then, now)
        )
        for field in (field for field in new if not alike(old[field], new[field])):
            told = {"reported": shown(old[field]), "recomputed": shown(new[field])}
            problem = "the recorded finding does not follow from the study"
            yield Difference(claim=f"finding {name}", expression=field, **told, problem=problem)


_DECIDED = ("action", "to", "seeds", "seeds_needed", "power", "reason")


def _decisions(records: Records, *, reworded: bool) -> Iterator[Difference]:
    """Compare the journal's decisions with the plan's branches.

    Skips a study that was not conducted (a replay), because its journal has no decisions.
    """
    recorded: dict[str, dict[str, Any]] = {
        str(event.detail.get("after")): event.detail for event in records.data.events if event.kind == "decision"
    }
    conducted = bool(recorded) or any(event.kind.startswith("trial_") for event in records.data.events)
    if not conducted or not (recorded or records.data.verdicts):
        return
    computed: dict[str, Decision] = {decision.after: decision for decision in records.path}
    for after in [*computed, *(name for name in recorded if name not in computed)]:
        subject, now, then = f"decision {after}", computed.get(after), recorded.get(after)
        if now is None or then is None:
            one_sided = (
                "the decision is not in the journal"
                if then is None
                else "the decision does not follow from the plan and the trials"
            )
            yield Difference(claim=subject, problem=one_sided)
            continue
        if _reasons_agree(then.get("reason"), now.reason, reworded=reworded):
            then = then | {"reason": now.reason}
        for field in _DECIDED:
            if not same(then.get(field), getattr(now, field)):
                yield Difference(
                    claim=subject,
                    expression=field,
                    reported=then.get(field),
                    recomputed=getattr(now, field),
                    problem="the recorded decision does not follow from the plan and the trials",
                )


def _files(whole: Page, files: Mapping[str, str], *, sealed: bool) -> Iterator[Difference]:
    changed = (
        "was changed after writing"
        if sealed
        else "was changed, or an earlier version wrote it; `researcher report` rewrites the report"
    )
    rendered = render(whole)
    for kind in [*rendered, *(kind for kind in files if kind not in rendered)]:
        path = Path(files[kind]) if kind in files else None
        subject = f"file {path.name if path else rendered[kind][0]}"
        if path is None:
            yield Difference(claim=subject, problem="the report has this file, but the records do not list it")
        elif kind not in rendered:
            yield Difference(claim=subject, problem="the report has no such file")
        elif not path.is_file():
            yield Difference(claim=subject, problem=_MISSING)
        elif path.read_bytes() != rendered[kind][1].encode():
            line = _first_difference(path.read_bytes().decode(errors="replace"), rendered[kind][1])
            yield Difference(claim=subject, reported=line[0], recomputed=line[1], problem=f"line {line[2]} {changed}")


def _first_difference(then: str, now: str) -> tuple[str, str, int]:
    """Return the first line that differs: its actual text, its expected text, and its number."""
    old, new = then.split("\n"), now.split("\n")
    shared = min(len(old), len(new))
    at = next((number for number in range(shared) if old[number] != new[number]), shared)
    return ("".join(old[at : at + 1])[:200], "".join(new[at : at + 1])[:200], at + 1)
