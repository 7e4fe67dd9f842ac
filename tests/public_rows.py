"""First rows of public data sets, in the form in which each is published, with values made up here;
and the words of the one command that trains on each.

`CHAT`: the rows are conversations. All others are texts, which `data.chat=true` makes chats of.
"""

import json
from typing import Any, NamedTuple


class PublicSet(NamedTuple):
    row: dict[str, Any]
    words: tuple[str, ...]  # of the command, after `--dataset FILE`
    prompt_has: str  # a text of the prompt
    answer: Any = None  # what rewards get as `answer`; None: they get none


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


MATCH = ("--reward", "exact_match")
MATH = ("--reward", "math")
CODE = ("--reward", "code")
OWN = ("--reward", "my_rewards.py:short")
"""For rows without a reference: a function of the completion alone."""
COUNTED = "Ann has 3 pens and buys 4. How many has she?"
CHOSEN = [user("Name a red fruit."), assistant("Cherry.")]
REJECTED = [user("Name a red fruit."), assistant("Plum?")]
OPTIONS = {"text": ["ice", "steam", "rain"], "label": ["A", "B", "C"]}
CHOICE = "data.prompt_template={question}\\n{choices.text:letters}\\nAnswer with one letter."
STDIN_TESTS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(0, 5) == 5"]

SETS = {
    "openai/gsm8k": PublicSet(
        {"question": COUNTED, "answer": "She has 3+4=<<3+4=7>>7 pens.\n#### 7"},
        ("data.preset=gsm8k",),
        COUNTED,
        "She has 3+4=<<3+4=7>>7 pens.\n#### 7",
    ),
    "EleutherAI/hendrycks_math": PublicSet(
        {
            "problem": "Compute $2^5$.",
            "level": "Level 1",
            "type": "Algebra",
            "solution": "We have $2^5 = \\boxed{32}$.",
        },
        (*MATH, "data.prompt_column=problem", "data.columns={answer: solution}"),
        "Compute",
        "We have $2^5 = \\boxed{32}$.",
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": PublicSet(
        {
            "data_source": "math_dapo",
            "prompt": [user("Find $x$ with $x+3=10$. End with Answer: $x$")],
            "ability": "MATH",
            "reward_model": {"ground_truth": "7", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "a-1"},
        },
        (*MATH, 'data.columns={answer: "reward_model.ground_truth"}'),
        "x+3=10",
        "7",
    ),
    "open-r1/OpenR1-Math-220k": PublicSet(
        {
            "problem": "How many primes are below 10?",
            "solution": "They are 2, 3, 5, 7, so $4$.",
            "answer": "4",
            "problem_type": "Number Theory",
            "question_type": "math-word-problem",
            "source": "made_up",
            "uuid": "u-1",
            "is_reasoning_complete": [True],
            "generations": ["<think>\n2, 3, 5, 7\n</think>\n\\boxed{4}"],
            "correctness_math_verify": [True],
            "correctness_llama": None,
            "finish_reasons": None,
            "correctness_count": 1,
            "messages": [user("How many primes are below 10?"), assistant("\\boxed{4}")],
        },
        (*MATH, "data.prompt_column=problem"),
        "primes",
        "4",
    ),
    "AI-MO/NuminaMath-CoT": PublicSet(
        {
            "source": "made_up",
            "problem": "What is $3 \\cdot 8$?",
            "solution": "It is $\\boxed{24}$.",
            "messages": [user("What is $3 \\cdot 8$?"), assistant("It is $\\boxed{24}$.")],
        },
        MATH,
        "cdot 8",
        "It is $\\boxed{24}$.",
    ),
    "Jiayi-Pan/Countdown-Tasks-3to4": PublicSet(
        {"target": 17, "nums": [7, 9, 1]},
        ("data.preset=countdown",),
        "Target: 17",
    ),
    "codeparrot/apps": PublicSet(
        {
            "problem_id": 0,
            "question": "Read two numbers and print their sum.",
            "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
            "input_output": STDIN_TESTS,
            "difficulty": "introductory",
            "url": "https://example.org/0",
            "starter_code": "",
        },
        (*CODE, "data.prompt_column=question", "data.columns={tests: input_output}"),
        "two numbers",
    ),
    "google-research-datasets/mbpp": PublicSet(
        {
            "task_id": 1,
            "text": "Write a function add(a, b).",
            "code": "def add(a, b):\n    return a + b",
            "test_list": ADD_TESTS,
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        (
            *CODE,
            "data.prompt_template={text}\\nYour code should pass: {test_list[0]}",
            "data.columns={tests: test_list}",
        ),
        "pass: assert add(1, 2) == 3",
    ),
    "openai/openai_humaneval": PublicSet(
        {
            "task_id": "Made/0",
            "prompt": 'def add(a, b):\n    """Return the sum."""\n',
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            "entry_point": "add",
        },
        (*CODE, "data.columns={tests: test}"),
        "def add",
    ),
    "KodCode/KodCode-V1": PublicSet(
        {
            "version": "v1.0",
            "style": "instruct",
            "subset": "Made",
            "question_id": "Made_1",
            "question": "Write add(a, b), which returns the sum.",
            "solution": "def add(a, b):\n    return a + b",
            "test": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
            "test_info": [{"function_name": "add", "parameter_list": "(a, b)"}],
            "gpt_difficulty": "easy",
        },
        (*CODE, "data.prompt_column=question", "data.columns={tests: test}"),
        "returns the sum",
    ),
    "BAAI/TACO": PublicSet(
        {
            "question": "Print the sum of two numbers.",
            "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
            "starter_code": "",
            "input_output": STDIN_TESTS,
            "difficulty": "EASY",
            "raw_tags": "[]",
            "name": None,
            "source": "made_up",
            "tags": "[]",
            "skill_types": "[]",
            "url": None,
            "Expected Auxiliary Space": None,
            "time_limit": "1 seconds",
            "date": None,
            "picture_num": "0",
            "memory_limit": None,
            "Expected Time Complexity": None,
        },
        (*CODE, "data.prompt_column=question", "data.columns={tests: input_output}"),
        "two numbers",
    ),
    "open-thoughts/OpenThoughts-114k": PublicSet(
        {
            "system": "Think step by step.",
            "conversations": [human("What is 6*7?"), gpt("6*7 is $\\boxed{42}$.")],
        },
        MATH,
        "Think step by step.",
        "6*7 is $\\boxed{42}$.",
    ),
    "HuggingFaceH4/ultrachat_200k": PublicSet(
        {
            "prompt": "Name a river.",
            "prompt_id": "p-1",
            "messages": [
                user("Name a river."),
                assistant("The Po."),
                user("And one in Asia?"),
                assistant("The Ob."),
            ],
        },
        (*MATCH, "data.answer_from=last_message"),
        "one in Asia?",
        "The Ob.",
    ),
    "tatsu-lab/alpaca": PublicSet(
        {
            "instruction": "Translate into German.",
            "input": "bread",
            "output": "Brot",
            "text": "Below is an instruction.\n\n### Instruction:\nTranslate into German.",
        },
        MATCH,
        "Translate into German.\n\nbread",
        "Brot",
    ),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": PublicSet(
        {
            "id": "s_0",
            "conversations": [human("Say hello."), gpt("Hello!"), human("Again."), gpt("Hello.")],
        },
        MATCH,
        "Again.",
        "Hello.",
    ),
    "Open-Orca/OpenOrca": PublicSet(
        {
            "id": "flan.1",
            "system_prompt": "",
            "question": "Is ice cold? Yes or no?",
            "response": "Yes",
        },
        (*MATCH, "data.prompt_column=question", "data.columns={answer: response}"),
        "Is ice cold?",
        "Yes",
    ),
    "databricks/databricks-dolly-15k": PublicSet(
        {
            "instruction": "Which colour is named?",
            "context": "The door is green.",
            "response": "Green",
            "category": "closed_qa",
        },
        MATCH,
        "Which colour is named?\n\nThe door is green.",
        "Green",
    ),
    "allenai/tulu-3-sft-mixture": PublicSet(
        {
            "id": "t_1",
            "messages": [user("Capital of Peru?"), assistant("Lima")],
            "source": "made_up",
        },
        MATCH,
        "Capital of Peru?",
        "Lima",
    ),
    "nvidia/HelpSteer2": PublicSet(
        {
            "prompt": "Explain rain.",
            "response": "Water falls from clouds.",
            "helpfulness": 3,
            "correctness": 4,
            "coherence": 4,
            "complexity": 1,
            "verbosity": 1,
        },
        OWN,
        "Explain rain.",
    ),
    "Anthropic/hh-rlhf": PublicSet(
        {
            "chosen": "\n\nHuman: Name a tree.\n\nAssistant: Oak.",
            "rejected": "\n\nHuman: Name a tree.\n\nAssistant: No.",
        },
        (*MATCH, "data.prompt_column=chosen", "data.answer_from=last_message"),
        "Name a tree.",
        "Oak.",
    ),
    "allenai/ai2_arc": PublicSet(
        {"id": "q_1", "question": "What is frozen?", "choices": OPTIONS, "answerKey": "A"},
        (*MATCH, CHOICE, "data.columns={answer: answerKey}"),
        "A. ice\nB. steam\nC. rain\nAnswer",
        "A",
    ),
    "cais/mmlu": PublicSet(
        {
            "question": "Which is a metal?",
            "subject": "made_up",
            "choices": ["wood", "iron", "clay", "silk"],
            "answer": 1,
        },
        (*MATCH, "data.prompt_template={question}\\n{choices:numbers}\\nAnswer with the number."),
        "0. wood\n1. iron",
        1,
    ),
    "tau/commonsense_qa": PublicSet(
        {
            "id": "c_1",
            "question": "Where are books kept?",
            "question_concept": "book",
            "choices": {"label": ["A", "B"], "text": ["shelf", "pond"]},
            "answerKey": "A",
        },
        (*MATCH, CHOICE, "data.columns={answer: answerKey}"),
        "A. shelf\nB. pond",
        "A",
    ),
    "hotpotqa/hotpot_qa": PublicSet(
        {
            "id": "h_1",
            "question": "Who wrote the book of the film Moor?",
            "answer": "Ida Lund",
            "type": "bridge",
            "level": "easy",
            "supporting_facts": {"title": ["Moor", "Ida Lund"], "sent_id": [0, 0]},
            "context": {
                "title": ["Moor", "Ida Lund"],
                "sentences": [["Moor is a film."], ["Ida Lund wrote it."]],
            },
        },
        (*MATCH, "data.prompt_template={context.sentences}\\n{question}"),
        "Ida Lund wrote it.",
        "Ida Lund",
    ),
    "mandarjoshi/trivia_qa": PublicSet(
        {
            "question": "Which planet is the largest?",
            "question_id": "tc_1",
            "question_source": "https://example.org/",
            "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
            "search_results": {"description": [], "filename": [], "rank": [], "title": []},
            "answer": {
                "aliases": ["Jupiter", "Planet Jupiter"],
                "normalized_aliases": ["jupiter", "planet jupiter"],
                "matched_wiki_entity_name": "",
                "normalized_matched_wiki_entity_name": "",
                "normalized_value": "jupiter",
                "type": "WikipediaEntity",
                "value": "Jupiter",
            },
        },
        (*MATCH, "data.prompt_column=question", 'data.columns={answer: "answer.aliases"}'),
        "Which planet",
        ["Jupiter", "Planet Jupiter"],
    ),
    "rajpurkar/squad": PublicSet(
        {
            "id": "q1",
            "title": "Bridges",
            "context": "The bridge was built in 1932.",
            "question": "When was it built?",
            "answers": {"text": ["1932", "in 1932"], "answer_start": [24, 21]},
        },
        (
            *MATCH,
            "data.prompt_template={context}\\n{question}",
            'data.columns={answer: "answers.text"}',
        ),
        "built in 1932.\nWhen",
        ["1932", "in 1932"],
    ),
    "google/boolq": PublicSet(
        {"question": "is snow warm", "answer": False, "passage": "Snow is frozen water."},
        (*MATCH, "data.prompt_template={passage}\\n{question}? Answer True or False."),
        "is snow warm? Answer",
        False,
    ),
    "HuggingFaceH4/ultrafeedback_binarized": PublicSet(
        {
            "prompt": "Name a red fruit.",
            "prompt_id": "f-1",
            "chosen": CHOSEN,
            "rejected": REJECTED,
            "messages": CHOSEN,
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        },
        (*MATCH, 'data.columns={answer: "chosen[-1].content"}'),
        "Name a red fruit.",
        "Cherry.",
    ),
    "trl-lib/tldr": PublicSet(
        {"prompt": "POST: I lost my keys.\n\nTL;DR:", "completion": " Keys lost."},
        (*MATCH, "data.columns={answer: completion}"),
        "TL;DR:",
        " Keys lost.",
    ),
    "deepmind/aqua_rat": PublicSet(
        {
            "question": "A car goes 60 km in an hour. How far in two?",
            "options": ["A)60", "B)120", "C)90"],
            "rationale": "60*2=120",
            "correct": "B",
        },
        (
            *MATCH,
            "data.prompt_template={question} {options} Answer with a letter.",
            "data.columns={answer: correct}",
        ),
        "B)120",
        "B",
    ),
}
"""By the name on the hub."""
