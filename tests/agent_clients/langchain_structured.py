"""langchain: structured output in each of its ways."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Product(BaseModel):
    """A product of two numbers."""

    value: int


model = ChatOpenAI(model="policy")
for method in ("json_schema", "json_mode", "function_calling"):
    wanted = model.with_structured_output(Product, method=method, include_raw=True)
    try:
        wanted.invoke(sys.argv[1])
    except ValueError:  # its answer does not fit
        continue
print(1.0)
