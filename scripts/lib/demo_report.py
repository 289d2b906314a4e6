"""What arrived in the demo: a line an event, then the closing table. Exits 1 when something is lost or invented.

Arguments: a file of lines "event id TAB commit time" of what committed, one of event ids that were rolled back, the
endpoint's records, and how many rows the outbox still has.
"""
import json
import math
import sys
from urllib.parse import unquote


def percentile(values, share):
    """The nearest-rank percentile of a sorted, non-empty list."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def main(committed_path, rolled_back_path, records_path, left):
    with open(committed_path) as file:
        committed = {event: float(at) for event, at in (line.split("\t") for line in file)}
    with open(rolled_back_path) as file:
        rolled_back = set(file.read().split())
    with open(records_path) as file:
        records = sorted((json.loads(line) for line in file), key=lambda record: record["head_at"])

    arrived, latencies = {}, []
    print(f"\n{'event id':36}  {'type':14}  {'key':10}  commit to request")
    for record in records:
        headers = {name.lower(): value for name, value in
                   (line.split(": ", 1) for line in record["headers"] if ": " in line)}
        event = headers.get("idempotency-key", "?")
        note = "?? never committed"
        if event in committed:
            latency = 1000 * (record["head_at"] - committed[event])
            latencies.append(latency)
            note = f"{latency:.2f} ms"
        if record["complete"] and record["acked"]:
            arrived[event] = arrived.get(event, 0) + 1
        print(f"{event:36}  {headers.get('ce-type', ''):14}  {unquote(headers.get('forze_key', '')):10}  {note}")

    lost = set(committed) - set(arrived)
    invented = set(arrived) - set(committed)
    latencies.sort()
    print(f"\n{'staged and committed':24}{len(committed):6}")
    print(f"{'staged and rolled back':24}{len(rolled_back):6}")
    print(f"{'delivered':24}{len(arrived):6}")
    print(f"{'left in the table':24}{left:>6}")
    if latencies:
        print(f"{'p50, commit to request':24}{percentile(latencies, 0.5):9.2f} ms")
        print(f"{'p99':24}{percentile(latencies, 0.99):9.2f} ms")
    if lost or invented or int(left):
        print(f"WRONG: lost {sorted(lost)}, delivered though rolled back {sorted(invented)}, left {left}")
        return 1
    print("every committed event arrived, and nothing that was rolled back")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
