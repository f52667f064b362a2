//! `lunette image compare`.

use std::io::Write;

use cli_common::{Failure, Outcome, print_line, print_reason};

use super::arguments::CompareArguments;
use super::disks::open_disk;
use super::pieces::{Lane, Piece, PiecePlan, Stop, failure, first_difference, is_zero};
use crate::meter::Meter;

/// Exit codes of qemu-img.
const DIFFERENT: u8 = 1;
const FAILED: u8 = 2;

/// Compares two disks. Failures have a separate exit code.
pub fn compare(arguments: &CompareArguments) -> Outcome {
    compare_disks(arguments).map_err(|failure| match failure {
        Failure::Reasons(reasons) => {
            for reason in reasons {
                print_reason(&reason);
            }
            Failure::Found(FAILED)
        }
        other => other,
    })
}

/// Compares two disks. The longer one must read as zeroes beyond the end of the other.
fn compare_disks(arguments: &CompareArguments) -> Outcome {
    let (one, other) = (arguments.one.as_path(), arguments.other.as_path());
    let named_files = arguments.named.files;
    let a = open_disk(one, arguments.format, named_files)?;
    let b = open_disk(other, arguments.other_format, named_files)?;
    let sizes = (a.bytes(), b.bytes());
    if arguments.strict && sizes.0 != sizes.1 {
        print_line(&format_args!(
            "they differ in size: {} and {} bytes",
            sizes.0, sizes.1
        ));
        return Err(Failure::Found(DIFFERENT));
    }
    let end = sizes.0.max(sizes.1);
    let mut meter = Meter::new(Some(end), arguments.quiet);
    let cut = PiecePlan::of(&[a.device().clone(), b.device().clone()], end);
    let compared = cut.process(&mut meter, compare_piece);
    let done = meter.end();
    match compared {
        Ok(()) => {}
        Err(Stop::Differs(at)) => {
            print_line(&format_args!("they differ at byte {at}"));
            return Err(Failure::Found(DIFFERENT));
        }
        Err(stop) => return Err(failure(stop, [one, other])),
    }
    if arguments.quiet {
        return Ok(());
    }
    writeln!(cli_common::stdout(), "they have the same content: {done}")?;
    if sizes.0 != sizes.1 {
        print_line(&format_args!(
            "one disk has {} bytes, the other {}; the rest of the longer one is zeroes",
            sizes.0, sizes.1
        ));
    }
    Ok(())
}

/// Compares a piece. A disk without data in it is not read.
fn compare_piece(lane: &mut Lane, piece: &Piece) -> Result<(), Stop> {
    for index in [0, 1] {
        if piece.has_data[index] {
            lane.read(index, piece)?;
        }
    }
    let [one, other] = match piece.has_data {
        [false, false] => return Ok(()),
        _ => lane.bytes(piece.length())?,
    };
    let not_zero = |bytes: &[u8]| match is_zero(bytes) {
        true => None,
        false => bytes.iter().position(|byte| *byte != 0),
    };
    let differs = match piece.has_data {
        [true, true] => first_difference(one, other),
        [true, false] => not_zero(one),
        [false, true] => not_zero(other),
        [false, false] => None,
    };
    match differs {
        Some(at) => Err(Stop::Differs(piece.start + at as u64)),
        None => Ok(()),
    }
}
