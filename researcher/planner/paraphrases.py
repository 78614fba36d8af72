"""What people say in other words than the planner reads, and the words for it: a table, applied to a topic in lower case.

English only. Knows the planner's own words for factors and metrics, and no instrument.
"""

from __future__ import annotations

import re
from collections.abc import Callable

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?:\.\d+)?|\.\d+)"
LEVEL = rf"{NUMBER}(?:e[-+]?\d+)?"


def reworded(text: str) -> str:
    """The topic, in the words that are read. Marks that hug a number or word, as in Markdown, are no part of it."""
    text = re.sub(r"(?<!\w)(\*\*|\*|`|\$)([^\s*`$]+)\1(?!\w)", r"\2", text)
    text = re.sub(rf"(?<!\w)([\"'])({LEVEL})\1(?!\w)", r"\2", text)
    text = re.sub(rf"“({LEVEL})”", r"\1", text)
    text = re.sub(r"(?<!\w)\*\*([^*]+)\*\*(?!\w)", r"\1", text)
    for said, meant in (*_BOUNDED, *_SAID_OTHERWISE):
        text = re.sub(said, meant, text)
    return text


def _kl_places(match: re.Match[str]) -> str:
    """`a KL penalty in the reward or in the loss`: where the penalty stands, and no metric."""
    text = match.group()
    if all(re.search(rf"\b(?:in|inside|from) (?:the )?{place}s?\b", text) for place in ("loss", "reward")):
        text = re.sub(r"\b(?:kl )?(?:in|inside|from) (?:the )?(loss|reward)s?\b", r"kl in \1", text)
    return text


_PERCENT = {
    "five": 5,
    "ten": 10,
    "fifteen": 15,
    "twenty": 20,
    "thirty": 30,
    "forty": 40,
    "fifty": 50,
    "eighty": 80,
    "ninety": 90,
    "hundred": 100,
}
_EXPONENTS = {
    word: n for n, word in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], 1)
}
ORDERS = rf"an?|{'|'.join(_EXPONENTS)}|\d\d?"
"""How many orders of magnitude can be read."""
_COUNT = rf"(\d+|{'|'.join(_EXPONENTS)}|ten)"
"""A number of things, in digits or in a word."""
_PARTS = {"quarter": 0.25, "third": 0.333, "fifth": 0.2, "tenth": 0.1}


def _averaging(match: re.Match[str]) -> str:
    """`averaging the loss over tokens`, `a sequence-level loss`, `per-token averaging`: what the loss is averaged over first."""
    text = match.group()
    unit = r"(token|call|timeline|episode|sequence)s?"
    if not re.search(
        rf"averag\w+ (?:the )?loss|loss averag|\bper[ -]{unit} (?:averag|loss)|\b{unit}[ -](?:mean|level|wise) (?:mean |policy |pg )?loss",
        text,
    ):
        return text
    text = re.sub(
        rf"\b(?:averag\w+ (?:of )?(?:the )?loss )?over (?:all )?(?:the )?{unit}\b", r"loss aggregation \1", text
    )
    text = re.sub(rf"\bper[ -]{unit}(?: (?:loss )?averag\w+| loss(?:es)?)?\b", r"loss aggregation \1", text)
    text = re.sub(
        rf"\b{unit}[ -](?:mean|level|wise)\b(?: (?:mean|policy|pg))?(?: loss(?:es)?)?(?: agg\w+)?",
        r"loss aggregation \1",
        text,
    )
    return text.replace("aggregation sequence", "aggregation episode")


def _reused(match: re.Match[str]) -> str:
    """`reusing each batch 4 times`."""
    return f"{match[1] or 2} epochs"


def _power_of_ten(match: re.Match[str]) -> str:
    """`ten to the minus five`, `4 times ten to the minus 5`."""
    many = _EXPONENTS.get(match[1] or "", match[1] or 1)
    return f"{many}e-{_EXPONENTS.get(match[2], match[2])}"


def _off_policy(match: re.Match[str]) -> str:
    """`does off-policy training hurt?`, of which the topic says no more."""
    return re.sub(r"\boff[ -]policy (?:training|learning|rollouts|data|samples)\b", "max staleness 1", match.group())


def _async(match: re.Match[str]) -> str:
    """`does asynchronous training help?`, where the topic says no more of staleness, and of nothing that goes with it."""
    text = match.group()
    if re.search(r"stale|behind|correction|importance|policy", text):
        return text
    text = re.sub(r"\b(?:fully )?async(?:hronous(?:ly)?)?\b", "max staleness 1", text)
    return re.sub(r"\bsync (?=training|updates)", "max staleness 0 ", text)


def _symmetric_clipping(match: re.Match[str]) -> str:
    """`clip-higher against symmetric clipping`: DAPO's 0.28 where no number says otherwise, against the range as ever."""
    text = match.group()
    if not re.search(r"\d*\.\d", text):
        text = re.sub(r"\bclip[ -]higher\b", "clip high 0.28", text)
    return re.sub(
        r"\b(?:symmetric(?:al)?|standard|ordinary|usual|vanilla|plain|normal) (?:ppo )?clip(?:ping)?(?: range)?\b|\bsymmetric(?:al)?(?: one)?(?=[?.]|$)",
        "the default clip high",
        text,
    )


def _orders(match: re.Match[str]) -> str:
    """`an order of magnitude`, `by two orders of magnitude`: what to multiply by."""
    times = 10 ** (int(match[2]) if match[2].isdigit() else _EXPONENTS.get(match[2], 1))
    return f"by a factor of {times}" if match[1] else f"{times} times"


_KIND_OF_EFFECT = "(?:positive|negative|adverse|harmful|beneficial|detrimental)"
_PUTTING = "(?:adding|including|using|having|enabling|introducing)"
_TAKING = "(?:removing|dropping|omitting|disabling|not (?:adding|including|using|having)|leaving out|taking away)"
_SAID_OTHERWISE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\bhalf a dozen\b", "6"),
    (r"\b(?:a|one) dozen\b", "12"),
    (rf"(?<![\d.])(?<!half )\b(by )?({ORDERS}) orders? of magnitude\b", _orders),
    (
        r"(?<![\w.,/:-])(\d+(?:\.\d+)?)k(?= (?!model|param)\w| *[,;?/]|\.(?!\w)|$)",
        lambda match: f"{float(match[1]) * 1000:g}",
    ),
    (
        r"\b(?:full|ordinary)[ -](?:(?:parameter|weight|model|rank)s?[ -])?(?:fine[ -]?tun(?:ing|e|es|ed)|finetuning|training|updates)\b"
        r"|\b(?:training |tuning |updating )?all (?:the |model )*(?:weights|parameters)\b",
        "parameters full",
    ),
    (
        r"\b(?:swap(?:s|ping)?|trad(?:e|es|ing)|exchang(?:e|es|ing)) "
        r"(?!off\b|accuracy|reward|speed|time|quality)((?:[^\s,.;?]+ ){1,4}?)for (?=\w)",
        r"from \1to ",
    ),
    (rf"\bnot ({LEVEL}),? but ({LEVEL})", r"\2 rather than \1"),
    (rf"\b({LEVEL}),? (?:and )?not ({LEVEL})", r"\1 rather than \2"),
    (
        r"\b(?:(?:rollouts|samples|episodes|data|weights) (?:that|which) (?:is|are) )?(?:up to )?(\w+)[ -]steps?[ -](?:off[ -]?policy|behind|stale|old)\b",
        r"max staleness \1",
    ),
    (
        r"\b(?:delay|lag) of (\w+) steps? between (?:sampling|generation|rollouts?) and (?:training|updates?|learning)\b",
        r"max staleness \1",
    ),
    (r"^(?!.*stale).*\boff[ -]policy (?:training|learning|rollouts|data|samples)\b.*$", _off_policy),
    (r"\bproximal policy optimi[sz]ation\b(?: \(ppo\))?", "ppo"),
    (r"\bgroup[ -]relative policy optimi[sz]ation\b(?: \(grpo\))?", "grpo"),
    (r"\bnot (dividing|normali[sz]ing) (?=(?:the )?(?:advantages?|rewards?|by)\b)", r"without \1 "),
    (r"\b(cosine|linear) annealing\b", r"\1 schedule"),
    (r"\b(?:lags? behind|trails?)\b", "underperform"),
    (r"\b(accuracy|reward) decays?\b", r"\1 drop"),
    (r"\blimits? (?=(?:the )?(?:accuracy|final reward|held))", "lower "),
    (
        r"\b(?:(?:need|take|require|use)s? |in )?(?:the )?(?:fewest|least) (?:training |optimi[sz]er )?steps\b",
        "steps needed",
    ),
    (
        rf"\b{_COUNT} (?:(?:rl|grpo|gradient|policy|training|optimi[sz]er|optimi[sz]ation|weight) )*(?:iterations|updates|rounds of training|training rounds)\b(?! per| each| of)",
        r"\1 steps",
    ),
    (rf"\b{_COUNT} (?:rl|grpo|gradient|policy) steps\b", r"\1 steps"),
    (r"\b(least|most) time\b", r"\1 training time"),
    (r",? (?:as|like) in (?:dr grpo|dapo|gspo|cispo|rloo|ppo)\b,?", ""),
    (r"\b(?:training|optimi[sz]er) steps needed\b", "steps needed"),
    (r"\b(fewer|less|more) (?:training|optimi[sz]er) steps (?=than\b)", r"\1 steps "),
    (rf"\b({'|'.join(_PERCENT)}) per ?cent\b", lambda match: f"{_PERCENT[match[1]]}%"),
    (r"(?<=\d) ?per ?cent\b", "%"),
    (
        r"\badvantages? (?:are |were )?(?:not |un)-?normali[sz]ed\b|\bunnormali[sz]ed advantages\b",
        "without advantage normalization",
    ),
    (r"^.*\basync.*$", _async),
    (r"^(?=.* ).*\b(?:clip[ -]high|decoupled clip|asymmetric clip).*$", _symmetric_clipping),
    (r"\b(?:fully |strictly )?(?:on[ -]policy|synchronous)\b", "max staleness 0"),
    (r"\bclip(?:ping)? (?:the )?gradients?(?: norms?)? (?:at|to)\b", "gradient clipping of"),
    (r"\bclip(?:ping)? (?:the )?gradients?\b", "gradient clipping"),
    (r"\bsaves? (?:any |much |training |wall[ -]?(?:clock )?)*time\b", "reduce wall time"),
    (r"(?:\bsize (?:of )?)?\b(\d+) ?x ?\1\b(?! ?(?:factorial|design|experiment))", r"size \1"),
    (r"^.*\b(?:averag\w+|loss)\b.*$", _averaging),
    (
        r"\b(?:re-?us|us|pass|go)(?:e|es|ing) (?:over )?(?:each|every|a|the) batch (?:(?:for )?(\w+) (?:times|epochs)|twice)\b",
        _reused,
    ),
    (r"\bepochs (?:on|over) (?:each|every|a|the same) batch\b", "epochs"),
    (r"\blow[ -]rank (?:adapters?|adapt(?:at)?ion)\b(?: \(lora\))?", "lora"),
    (r"\bstale (?:samples|rollouts|episodes|data|experience|weights)\b", "max staleness"),
    (
        r"\b(?:leav|keep|hold|kept|held)(?:e|ing)? (?:the )?(?:learning[ -]?rate|lr) (?:constant|fixed|flat)\b(?! (?:at|to|of)\b| ?[\d(])",
        "constant schedule",
    ),
    (r"(?<= )(?:decaying|annealing) it\b", "learning rate schedule"),
    (r"\b(token|call|timeline|episode)[ -](?:level|wise)\b", r"\1"),
    (r"\b(token|call|timeline|episode) (?:policy |pg )?loss\b(?! (?:agg|averag|mean|normali))", r"loss aggregation \1"),
    (r"\badvantages? (?:be |are )?normali[sz]ed\b", "need advantage normalization"),
    (r"\b(lora|adapters?) (r|rank|alpha) ?[= ]", r"\1 \2 "),
    (r"\b(lora)(?: with)? r (?=\d)", r"\1 rank "),
    (r"\b[tτ] ?= ?(?=\d\.\d)", "temperature "),
    (r"\bnon[ -]?inferior(?:ity)?(?: to)?\b", "no worse than"),
    (r"\b(?:the |a )?(?:lack|absence) of\b", "without"),
    (r"\bw/o\b", "without"),
    (r"\bw/(?= ?\w)", "with "),
    (r"(?<=po|oo) minus (?=(?:the |its |an? )?[a-z])", " without "),
    (r"\bablate (?=(?:the |a |an |its )?[a-z](?!.*\d))", "removing "),
    (rf"\b{_KIND_OF_EFFECT} or {_KIND_OF_EFFECT} (?=effect|impact|influence)", ""),
    (
        r"\b(?:adverse|negative|detrimental|deleterious|unfavou?rable) (effect|impact|influence|consequence)s?\b",
        r"harmful \1",
    ),
    (
        rf"\b(?:({'|'.join(_EXPONENTS)}|\d+(?:\.\d+)?) (?:times|x) )?(?:ten|10) to the (?:power (?:of )?)?(?:minus|negative) ?"
        rf"({'|'.join(_EXPONENTS)}|\d)(?:th)?\b",
        _power_of_ten,
    ),
    (
        r"\b(?:the |an? )?[\w.+-]+ (?:paper|authors|report|blog(?: post)?) (?:claim|show|report|argue|suggest|find|found|say|state)\w*(?: that)?\b",
        "",
    ),
    (r"(?:^|(?<=[.?!;] ))following [\w.+-]+,|, as [\w.+-]+ (?:does|did|do)(?:,|(?=[.?!;]))", " "),
    (
        r"(\b(?:as \w+|same) )?\bas in (?:(?:dr\.? ?)?\w*po|rloo|reinforce(?:\+\+)?)(?!\w)",
        lambda match: match.group() if match[1] else "",
    ),
    (
        r"\b(?:according to|as in|following|as reported (?:in|by)) the [\w.+-]+ (?:paper|authors|report|blog(?: post)?)\b,?",
        " ",
    ),
    (r"\bnot (?:only|just|merely)\b([^.?!;]*?),? but (?:also |even )?", r"\1 and "),
    (rf"\b(?:{_PUTTING}),? (?:and |but )?not {_TAKING}\b,?", "adding"),
    (rf"\b(?:{_TAKING}),? (?:and |but )?not {_PUTTING}\b,?", "removing"),
    (
        r"([\w.-]+) (?:is|are|was|were|gets?) (?:(?:swapped|traded|exchanged) (?:for|with)|replaced (?:by|with))\b",
        r"from \1 to",
    ),
    (r"\b(?:provided|assuming)(?: that)?\b", "given"),
    (r" or not(?= (?:change|affect|matter|influence|help|hurt|improve|raise|lower)|[?.,]|$)", ""),
    (rf"\b(?:{_PUTTING} or {_TAKING}|{_TAKING} or {_PUTTING})\b", "with or without"),
    (r"\bharmless\b", "not harmful"),
    (r"\b(?:the |any )?diminishing returns\b", "an effect"),
    (r"\b(\w+) steps? of staleness\b", r"max staleness \1"),
    (r"\bmore or less (?=the same|equal|identical|independent|unaffected)", ""),
    (r"\b(?:positive|favou?rable) (effect|impact|influence|consequence)s?\b", r"beneficial \1"),
    (r"\b(?:adversely|negatively|detrimentally) (?:affect|impact|influence)(?:s|ed)?\b", "hurt"),
    (r"\bpositively (?:affect|impact|influence)(?:s|ed)?\b", "improve"),
    (r"(^|[.?!;] )((?:in|with) (?:less|more) [a-z -]*time),? (.+?)(?=[.?!;](?:\s|$)|$)", r"\1\3 \2"),
    (r"\b(?:preferable|superior) to\b", "better than"),
    (r"\binferior to\b", "worse than"),
    (
        r"\b(?:(?:my|our) (?:guess|bet|hunch|expectation|prediction) (?:is|would be)|i (?:would )?(?:guess|bet))\b",
        "i expect",
    ),
    (r"\blinearly\b", "linear"),
    (r"\bbest[ -]of[ -](?:n|\d+)\b(?!,? ?(?:or |and )?\d)", "bestofn"),
    (r"\bpass ?@ ?1\b", "accuracy"),
    (
        r"\ba (quarter|third|fifth|tenth) of (?=(?:the |our |its )?(?:default |usual )?(?:learning|lr|group|batch|temp|rollout|sample|step|token|rank|kl))",
        lambda match: f"{_PARTS[match[1]]} times ",
    ),
    (
        r"\b(?:asymmetric(?:al)?|decoupled) clip(?:ping)?(?: range)? ?\(?(?:low(?:er)?|below)?:? ?(\d*\.\d+),? (?:and )?(?:high(?:er)?|upper|above):? ?(\d*\.\d+)\)?",
        r"clip low \1 and clip high \2",
    ),
    (r"\bwith (?:respect|regard) to\b", "in terms of"),
    (r"\b(?:sweep(?:s|ing)?|ablat(?:ions?|e)|grid search)\b", " "),
    (r"\bablating\b", "removing"),
    (rf"({LEVEL}) ?(?:\.\.+|…) ?({LEVEL})", r"\1 to \2"),
    ("∈", " in "),
    (r"^.*\bkl\b.*$", _kl_places),
    (r"\b(?:leaving out|leave out|skipping|skip|getting rid of|turning off|switching off)\b", "removing"),
    (
        r"\b(linear|cosine)(?:ly)?[ -](?:decaying|annealed|annealing|decayed) (?:of )?(?:the |a )?(?:learning[ -]?rate|lr)\b",
        r"\1 schedule",
    ),
    (r"\b(?:decaying|annealing|annealed|decayed) (?:the |a )?(?:learning[ -]?rate|lr)\b", "learning rate schedule"),
    (
        r"\b(?:decreasing|lowering|reducing) (?:the )?(?:learning[ -]?rate|lr) (?:over|during|throughout|along|in the course of)\b",
        "learning rate schedule over",
    ),
    (r"\bconstant (?:learning[ -]?rate|lr)\b(?! (?:schedule|decay|of|at)\b|\s*[=\d(])", "constant schedule"),
    (
        r"\brewards? (?:rise|grow|increase|climb|improve|go up)s? (faster|quicker|sooner|slower)\b",
        r"learn \1",
    ),
    (
        r"\b(?:decoupled clip(?:ping)?|clip[ -]higher)(?: range)? "
        r"(?:\(?(\d*\.\d+) ?/ ?(\d*\.\d+)\)?|\((\d*\.\d+), ?(\d*\.\d+)\))",
        lambda match: f"clip low {match[1] or match[3]} and clip high {match[2] or match[4]}",
    ),
    (r"\bcosts? (?:more )?(?=wall|time)", "raise "),
    (r"\bcosts? (more|less)(?= than\b| with\b| at\b|\?|\.|$)", r"take \1 time"),
    (
        r"\b(?:tak(?:e|es|ing)|lasts?|trains?|runs?|needs?) (twice|half|\w+ times) as long(?: as)?\b|\b(twice|half|\w+ times) as (?:expensive|costly)(?: as)?\b",
        lambda match: f"take {'less' if 'half' in match.groups() else 'more'} time than",
    ),
    (r"\btak(?:e|es|ing) longer(?! to (?:learn|reach|converge|improve|get|solve)\b| in\b)(?=.)", "take more time"),
    (r"\bhow long (?=(?:do|does|did|will|would)\b[^?.]*\b(?:take|last|run)s?\b(?! to\b))", "how much training time "),
    (
        r"\bhow many (?:more |fewer )?(?:training |optimi[sz]er )?steps (?=(?:are|is|do|does|did|will|would)\b[^?.]*\b(?:needed|need|takes?|required?)\b)",
        "what steps needed ",
    ),
    (r"\bcosts? (?=(?:any |no )?(?:accuracy|reward|final|held|performance))", "lower "),
    (r"\bcosts? (?=nothing\b)", "hurt "),
    (
        r"\b(?:learning[ -]?rate|lr) (?:that )?(?:start|begin)(?:s|ing)? (?:at|from|with)\b",
        "learning rate schedule from",
    ),
    (r"\bwarm(?:ing|ed)?[ -]?up (?:the )?(?:learning[ -]?rate|lr)\b", "warmup"),
    (r"\bwarm[ -]?up lasts? (?=\d)", "warmup of "),
    (r"\bwarm[ -]?up (?:for|over|of|during|lasting|in) (?:the first )?(\w+) steps?\b", r"warmup \1"),
    (r"\b(\w+)[ -]steps? (?:of )?(?:linear )?(?:(?:learning[ -]?rate|lr) )?warm[ -]?up\b", r"warmup \1"),
)
"""How people say a level without its factor's name, and what else a plainer word stands for."""
_LIMIT = r"(?:no more than|not more than|at most|at the most|less than|fewer than|no longer than|not longer than|under|up to|a maximum of)"
_EACH = (
    r"(?: (?:per|for each|for every|in each) (?:arm|condition|level|setting|side|method|variant|algorithm)\b| each\b)"
)
_BOUNDED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (rf"\bn ?[=:] ?(\d+)(?: (?:random |training )?(?:run|seed|repeat|repetition|replicate|replication)s?\b{_EACH}?|{_EACH})", r"\1 seeds"),
    (r"\(n ?[=:] ?(\d+)\)", r"(\1 seeds)"),
    (rf"(?<![\w.-]){_COUNT} (?:independent |random |training )*(?:repeats|repetitions?|replicates|replications?)\b{_EACH}?", r"\1 seeds"),
    (rf"\b{_COUNT} (?:independent |random |training )*(?:runs?|trials?){_EACH}", r"\1 seeds"),
    (rf"\b(?:averag(?:ed?|ing)|mean) (?:over|across|of) {_COUNT} (?:independent |random |training )*(?:runs?|trials?)\b", r"with \1 seeds"),
    (rf"\b(?:(?:run|repeat)(?:ning|ing)? (?:each|every|all|both)(?: arms?)?|each (?:arm )?(?:is )?(?:run|repeated)) {_COUNT} times\b", r"with \1 seeds"),
    (r"\bhalf an hour\b", "30 minutes"),
    (r"\bhalf a day\b", "12 hours"),
    (r"\b(?:an|one) hour and a half\b", "90 minutes"),
    (r"\ban? (hour|day)\b", r"1 \1"),
    (rf"\b(?:(?:in|within|taking|takes|using|use|spending|spend) )*{_LIMIT} (\d+(?:\.\d+)?) ?(hours?|hrs?|h|minutes?|mins?|days?)\b", r"within \1 \2"),
    (r"\b(?:at least|not less than|no less than|no fewer than|not fewer than|a minimum of) (\w+) (?:random )?seeds?\b", r"minimum \1 seeds"),
    (rf"\b(?:(?:in|within|with|for|using) )*(?:no more than|not more than|at most|at the most|no longer than|not longer than|a maximum of) {_COUNT} ((?:training |optimi[sz]er )?steps)\b", r"within \1 \2"),
    (r"\b(\w+) or more (?:random )?seeds?\b", r"minimum \1 seeds"),
    (r"\b(\w+) or (?:fewer|less) (?:random )?seeds?\b", r"maximum \1 seeds"),
    (r"\b(?:between (\d+) and|(?:from )?(\d+) ?(?:to|-)) ?(\d+) (?:random )?seeds?\b", r"minimum \1\2 seeds maximum \3 seeds"),
    (r"\bseeds (\d+(?:, ?\d+)*,? and \d+)\b", lambda m: f"{len(re.findall(r'[0-9]+', m[1]))} seeds"),
    (r"\b(?:fewer|less) than (\d+) (?:random )?seeds?\b", lambda m: f"maximum {int(m[1]) - 1} seeds"),
    (rf"\b{_LIMIT} (\w+) (?:random )?seeds?\b", r"maximum \1 seeds"),
    (r"\bmore than (\d+) (?:random )?seeds?\b", lambda m: f"minimum {int(m[1]) + 1} seeds"),
)  # fmt: skip
"""Limits that sound like claims: `in less than half an hour`, `with no more than 6 seeds`."""
