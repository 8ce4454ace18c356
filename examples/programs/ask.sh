#!/bin/sh
# An agent in another language: it asks once with curl, and prints 1 if the answer contains the right number.
set -eu

cat > problem.json
python3 -c '
import json, os
problem = json.load(open("problem.json"))
messages = [{"role": "user", "content": problem["prompt"]}]
json.dump({"model": os.environ["OPENAI_MODEL"], "messages": messages}, open("request.json", "w"))
print(problem["answer"])' > right

# The address and the key arrive on standard input: other users of the node see the words of a command.
printf 'url = "%s/chat/completions"\nheader = "Authorization: Bearer %s"\n' "$OPENAI_BASE_URL" "$OPENAI_API_KEY" |
    curl --config - --silent --show-error --fail-with-body --header "Content-Type: application/json" \
        --data @request.json > response.json

answer=$(python3 -c 'import json; print(json.load(open("response.json"))["choices"][0]["message"]["content"])')
echo "the model answers: $answer"
case " $answer " in
    *[!0-9]"$(cat right)"[!0-9]*) echo 1 ;;
    *) echo 0 ;;
esac
