"""langchain: structured output in each of its ways."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Product(BaseModel):
    """A product of two numbers."""

    value: int


model = ChatOpenAI(model="policy", max_tokens=20)
for method in ("json_schema", "json_mode", "function_calling"):
    wanted = model.with_structured_output(Product, method=method, include_raw=True)
    wanted.invoke(sys.argv[1])
print(1.0)
