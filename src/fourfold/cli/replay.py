"""`fourfold replay`: the step of a failure bundle, again, on one device."""

from __future__ import annotations

from pathlib import Path

from fourfold.cli.output import print_document, story


def replay(bundle: Path, /, *, json: bool = False) -> int:
    """Run the step of a failure bundle again, on one device, and name the first module that is not finite.

    Examples:

        fourfold replay runs/tiny-1/failures/step-000005-rank1
        fourfold replay runs/tiny-1/failures/step-000005-rank1 --json
        fourfold report runs/tiny-1

    Parameters
    ----------
    bundle
        A folder that a failed run left under `failures`.
    json
        Print one JSON document on stdout.
    """
    from fourfold.train.replay import replay as run_again

    document = run_again(bundle)
    if json:
        print_document(document)
        return 0
    print(f"step {document['step']} of rank {document['rank']}, again on one device")
    for row in document["microbatches"]:
        other = "" if row["targets"] == row["valid_targets"] else f" of {row['valid_targets']} valid"
        print(
            f"  microbatch {row['microbatch']:>3}  loss sum {row['loss_sum']:<14.6g} targets {row['targets']}{other}"
        )
    print(f"gradient norm of these microbatches: {document['grad_norm']:.6g}")
    print(f"first value that is not finite: {document['first_nonfinite'] or 'none'}")
    if document["error"]:
        print(f"raised: {document['error']}")
    print(f"the failure came again: {'yes' if document['reproduced'] else 'no'}")
    story(f"recorded then: {document['recorded_error'].splitlines()[0]}")
    return 0
