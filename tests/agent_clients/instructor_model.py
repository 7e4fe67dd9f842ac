"""instructor: a model of pydantic, by tools and by JSON."""

import sys

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel


class Product(BaseModel):
    """A product of two numbers."""

    value: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(), mode=mode)
    try:
        client.chat.completions.create(
            model="policy",
            response_model=Product,
            max_tokens=30,
            messages=[{"role": "user", "content": sys.argv[1]}],
        )
    except IncompleteOutputException:  # its answer was cut off
        continue
    except InstructorRetryException as error:  # its answers do not fit
        if "Error code" in str(error):
            raise
print(1.0)
