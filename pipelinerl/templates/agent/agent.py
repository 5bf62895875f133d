"""Answers one question, with a calculator. Reads {"prompt": ...} on standard input and prints the answer.

The program uses the OpenAI-compatible server that OPENAI_BASE_URL and OPENAI_API_KEY name. It imports nothing from PipelineRL.
"""

import ast
import json
import operator
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Value of an expression of numbers with +, - and *.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        },
    }
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    def value(node):
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
                return OPERATORS[type(kind)](value(left), value(right))
        raise ValueError(expression)

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except (ValueError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def answer(client: OpenAI, question: str) -> str:
    messages = [{"role": "system", "content": "Answer with a number only."}, {"role": "user", "content": question}]
    while True:
        reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                result = calculate(json.loads(call.function.arguments)["expression"])
            except (ValueError, KeyError, TypeError) as error:
                result = f"error: {error!r}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    print(answer(OpenAI(), json.load(sys.stdin)["prompt"]))
