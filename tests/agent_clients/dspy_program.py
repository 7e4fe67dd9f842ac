"""dspy."""

import os
import sys

import dspy

lm = dspy.LM(
    "openai/policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=30,
    cache=False,  # else later episodes, and those of later runs, get the answers of earlier ones
)
dspy.configure(lm=lm)
lm(sys.argv[1])
try:
    dspy.Predict("question -> answer: int")(question=sys.argv[1])
except Exception as error:  # its answer does not fit
    if "status" in str(error).lower() and "400" in str(error):
        raise
print(1.0)
