"""What the figures of a report mean; stands in every report, so that a number never travels without its definition."""

from drafts.figures import LEAST_FOR_INTERVAL

DEFINITIONS = {
    "plain": "the target without any draft, in the same engine with the same weights, run question by question in turn "
    "with the other arms",
    "decode speed": "tokens after the first emission / seconds from the first to the last emission, summed over "
    "questions; the prompt's reading is not in it, nor are tokens that came with the first emission",
    "x plain": "decode speed of the arm / decode speed of plain, over the same questions; plain is the one that ran in "
    "the same group, because arms that do not fit into memory together run in groups with a plain arm each; an arm "
    "that broke off and went on after a --resume has a group of its own for that, with plain run again. Where texts "
    "differ, each question counts plain's tokens at the speed of either, so that it weighs the same in both; one in "
    "which either has no token to time is left out",
    "warm-up": "before it is timed, every arm answers with every draft that it has in memory, at gamma 3; a policy has "
    "no part in it, learns nothing from it, and neither does what is saved of it. Blocks of other lengths are met "
    "first in a timed answer",
    "questions that count": "those that both the arm and plain answered in the same turns; a question with an error in "
    "any turn or repeat of either is left out of both, and shown. Of several repeats, the one of median speed counts "
    "for each question",
    "n, same N": "questions that count for an arm, where arms have different ones; and x plain over the N that all of "
    "them have, by which arms can be compared with each other",
    "1st repeat": "x plain of the first repeat alone; the headline is of it, with its least task. A policy keeps what "
    "it learned from repeat to repeat, as from question to question, so that the later ones meet texts that it has "
    "seen before. Ratios and rates, of tasks and categories too, and regret are of the median repeat; tokens per "
    "round, acceptance, drafts, loads, shares of the time and equality count all repeats",
    "least task": "the smallest x plain of the tasks with at least two questions; none unless there are two such tasks",
    "weights": "what the arm computes with; an arm that is marked (*) has other weights than plain, so that its text "
    "and its work are not the same",
    "95% interval": "bootstrap over questions (4000 resamples, the same ones for every arm): what other questions of "
    "this kind would have given; none below "
    f"{LEAST_FOR_INTERVAL} questions, and of fewer than about 20 it is narrower than it ought to be",
    "task": "Spec-Bench's: mt-bench (writing, roleplay, reasoning, math, coding, extraction, stem, humanities), "
    "translation, summarization, qa, math_reasoning, rag; any other category is a task of its own",
    "whole turn": "all tokens / seconds from the prompt to the end, the prompt's reading included; as a ratio to plain",
    "first token": "median seconds from handing over the prompt to the first token of any kind",
    "prefill": "prompt tokens / seconds to the first token",
    "tokens per round": "tokens emitted by each target forward after the prompt's, the target's own (corrected or "
    "bonus) token included",
    "acceptance": "accepted / proposed draft tokens; by position: share accepted of the proposals that reached that "
    "place of their block (known only where every answer tells how many reached it)",
    "rounds by draft": "share of the rounds in which that draft proposed; plain = none did, ngram = lookup did",
    "lookup first": "policies have lookup (ngram) in front of their drafts, static:DRAFT@GAMMA and the published ones "
    "too: where the last two or more tokens came before in the text, what followed them there is proposed, and no "
    "draft is asked. So ngram has a share of the rounds of each; plain and arms with lookup=off are without it",
    "rounds by gamma": "share of the rounds by how many tokens a draft was to propose (gamma), as planned; 0 = a plain "
    "step",
    "switches": "how often a draft proposed where another one had proposed before it in the same answer; lookup counts "
    "as a draft, and plain steps between are passed over",
    "acceptance by draft": "of the blocks that a draft proposed in a domain, the share whose first token stood: how "
    "long blocks were does not matter to it. All policies' turns together; drafts have blocks where policies chose "
    "them, which is no sample of the domain ('edgespec bench record' asks every draft everywhere)",
    "fallback": "share of rounds in which the draft that the policy wanted most could not run, because it was not in "
    "memory or still had to read what it had missed; one that edgespec does not let read is not wanted",
    "loads": "drafts that became resident while answers were made; hidden seconds passed beside rounds, in exposed "
    "ones rounds waited",
    "planning": "seconds on the decoding thread spent on choosing draft and length, learning and features / decode "
    "seconds; the ranker's seconds pass in a thread of its own",
    "catch-up": "seconds in which drafts read what they had missed of the text",
    "bookkeeping": "seconds from the target's logits to the tokens that stand: judging the block, and setting caches "
    "to where it ends",
    "other": "the rest of the decode seconds, which no other column counts: handing tokens on, and what lies between "
    "rounds",
    "J/token": "joules of the whole board, the prompt's reading included, for each token of the answers; the column is "
    "there where a board measures it",
    "equal texts": "answers equal to plain's, token by token, of those that had the same prompt (a second turn has "
    "plain's prompt only if the first was equal); every repeat counts. A near tie is a difference where the target's "
    "two best logits and those of the two tokens lie within what rounding explains (0.001 in float32, 0.5 in 8 bits "
    "and the file's blocks). Other engines promise no equal text",
    "errors": "answers that failed; never in a time",
    "peak memory": "highest resident bytes of the arm's own process",
    "memory over time": "resident bytes of each arm's process after each of its turns, by the clock of the run that "
    "all arms share; what passed between sessions (a --resume) is cut out, and shards come one after the other",
    "regret": "decode seconds beyond those of the best fixed arm in hindsight, added up in the order of the run. Fixed "
    "arms do not choose among drafts: plain, ngram and static ones; the best is the one of this run that "
    "took the fewest seconds over all questions that every policy answered (a draft without an arm of its own is not "
    "among them). Below 0 a policy has been faster. Every arm is charged for plain's tokens at its own speed relative "
    "to the plain beside it; plain's tokens after the first are as many as its rounds",
    "disturbance": "share of the machine's processors that other processes took meanwhile, arms that only waited among "
    "them",
}
