//! `lunette iscsi copy` and `lunette iscsi verify`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cli_common::{Failure, Outcome, print_line};
use iscsi_initiator::Sameness;
use sha2::{Digest, Sha256};

use super::arguments::{CopyArguments, Transfer};
use super::ends::{Destination, Piece, Source};
use crate::meter::Meter;
use crate::same_file::is_same_file;

/// Returns a flag that Ctrl-C and SIGTERM set; the second signal ends the process.
fn interrupted() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, flag.clone())?;
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(flag)
}

/// SHA-256 of all bytes; holes count as zeroes.
struct Checksum {
    hash: Sha256,
    zeroes: Vec<u8>,
}

impl Checksum {
    fn new() -> Checksum {
        Checksum {
            hash: Sha256::new(),
            zeroes: vec![0; 1 << 16],
        }
    }

    fn take(&mut self, piece: &Piece) {
        match piece {
            Piece::Data(data) => self.hash.update(data),
            Piece::Hole(bytes) => {
                let mut left = *bytes;
                while left > 0 {
                    let take = left.min(self.zeroes.len() as u64) as usize;
                    self.hash.update(&self.zeroes[..take]);
                    left -= take as u64;
                }
            }
        }
    }

    fn text(self) -> String {
        let bytes = self.hash.finalize();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the number of bytes from `--from` to the end of the source, if its size is known.
fn bytes_left(source: &Source, transfer: &Transfer) -> Result<Option<u64>, Failure> {
    let Some(size) = source.size() else {
        return Ok(None);
    };
    match size.checked_sub(transfer.from) {
        Some(left) => Ok(Some(left)),
        None => Err(Failure::mistake(format!(
            "--from {}: beyond the end of {}, which has {size} bytes",
            transfer.from, transfer.source
        ))),
    }
}

/// Copies, and prints bytes, rate and checksum.
pub fn copy(arguments: &CopyArguments) -> Outcome {
    let transfer = &arguments.transfer;
    let interrupted = interrupted()?;
    let (from, to) = (&transfer.source, &transfer.destination);
    if is_same_file(Path::new(from), Path::new(to)) {
        return Err(Failure::mistake(format!(
            "{from}: source and destination are the same file"
        )));
    }
    let mut source = Source::open(&transfer.source, transfer)?;
    let size = source.size();
    let left = bytes_left(&source, transfer)?;
    let mut destination = Destination::open(arguments, size)?;
    if let (Some(one), Some(other)) = (source.unit(), destination.unit())
        && one.compare(other, false) == Sameness::Proven
    {
        return Err(Failure::mistake(
            "source and destination are the same logical unit",
        ));
    }
    let mut meter = Meter::new(left, transfer.quiet);
    let mut checksum = Checksum::new();
    let mut at = transfer.from;
    while let Some(piece) = source.next()? {
        checksum.take(&piece);
        let bytes = piece.len();
        destination.put(piece)?;
        at += bytes;
        meter.add(bytes);
        if interrupted.load(Ordering::Relaxed) {
            // Writes the data received so far, except for a partial block, so that the next run continues
            // there.
            let step = source.granularity().max(destination.granularity());
            at -= at % step;
            destination.finish()?;
            let done = meter.end();
            print_line(&format_args!(
                "interrupted: {done}; hint: continue with --from {at}"
            ));
            return Err(Failure::Interrupted);
        }
    }
    destination.finish()?;
    source.close()?;
    let done = meter.end();
    let line = format!("{done}, SHA-256 {}", checksum.text());
    if transfer.destination == "-" {
        print_line(&line);
        return Ok(());
    }
    Ok(writeln!(cli_common::stdout(), "{line}")?)
}

/// Pieces of the other source, cut to requested lengths.
struct CutPieces {
    source: Source,
    rest: Option<Piece>,
}

impl CutPieces {
    /// Returns at most `bytes`: fewer at the end of a piece, `None` at the end of the source.
    fn next(&mut self, bytes: u64) -> Result<Option<Piece>, Failure> {
        let piece = match self.rest.take() {
            Some(piece) => piece,
            None => match self.source.next()? {
                Some(piece) => piece,
                None => return Ok(None),
            },
        };
        if piece.len() <= bytes {
            return Ok(Some(piece));
        }
        Ok(Some(match piece {
            Piece::Data(mut data) => {
                self.rest = Some(Piece::Data(data.split_off(bytes as usize)));
                Piece::Data(data)
            }
            Piece::Hole(all) => {
                self.rest = Some(Piece::Hole(all - bytes));
                Piece::Hole(bytes)
            }
        }))
    }
}

/// Index of the first different byte of two pieces of the same length.
fn difference(a: &Piece, b: &Piece) -> Option<usize> {
    match (a, b) {
        (Piece::Data(a), Piece::Data(b)) => a.iter().zip(b).position(|(a, b)| a != b),
        (Piece::Data(data), Piece::Hole(_)) | (Piece::Hole(_), Piece::Data(data)) => {
            data.iter().position(|byte| *byte != 0)
        }
        (Piece::Hole(_), Piece::Hole(_)) => None,
    }
}

/// Compares up to the end of the source. Fails if the destination is shorter.
pub fn verify(transfer: &Transfer) -> Outcome {
    let interrupted = interrupted()?;
    let mut source = Source::open(&transfer.source, transfer)?;
    let mut other = CutPieces {
        source: Source::open(&transfer.destination, transfer)?,
        rest: None,
    };
    let left = bytes_left(&source, transfer)?;
    let mut meter = Meter::new(left, transfer.quiet);
    let mut at = transfer.from;
    while let Some(piece) = source.next()? {
        let mut rest = Some(piece);
        while let Some(piece) = rest.take() {
            let Some(same) = other.next(piece.len())? else {
                return Err(Failure::because(format!(
                    "{} ends at byte {at}, before {}",
                    transfer.destination, transfer.source
                )));
            };
            let bytes = same.len();
            let (piece, behind) = split(piece, bytes);
            if let Some(byte) = difference(&piece, &same) {
                meter.end();
                return Err(Failure::because(format!(
                    "{} and {} differ at byte {}",
                    transfer.source,
                    transfer.destination,
                    at + byte as u64
                )));
            }
            at += bytes;
            meter.add(bytes);
            rest = behind;
        }
        if interrupted.load(Ordering::Relaxed) {
            let done = meter.end();
            print_line(&format_args!(
                "interrupted, no difference so far: {done}; hint: continue with --from {at}"
            ));
            return Err(Failure::Interrupted);
        }
    }
    source.close()?;
    other.source.close()?;
    Ok(writeln!(
        cli_common::stdout(),
        "no difference: {}",
        meter.end()
    )?)
}

/// Splits a piece after `bytes`; the second part is `None` if nothing remains.
fn split(piece: Piece, bytes: u64) -> (Piece, Option<Piece>) {
    if piece.len() <= bytes {
        return (piece, None);
    }
    match piece {
        Piece::Data(mut data) => {
            let behind = data.split_off(bytes as usize);
            (Piece::Data(data), Some(Piece::Data(behind)))
        }
        Piece::Hole(all) => (Piece::Hole(bytes), Some(Piece::Hole(all - bytes))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_compared_and_summed_as_the_zeroes_that_they_are() {
        let data = |bytes: &[u8]| Piece::Data(bytes.to_vec());
        assert_eq!(difference(&data(&[0, 0]), &Piece::Hole(2)), None);
        assert_eq!(difference(&Piece::Hole(3), &data(&[0, 0, 1])), Some(2));
        assert_eq!(difference(&data(&[1, 2]), &data(&[1, 3])), Some(1));
        let sum = |pieces: &[Piece]| {
            let mut checksum = Checksum::new();
            pieces.iter().for_each(|piece| checksum.take(piece));
            checksum.text()
        };
        let zeroes = vec![0; 100_000];
        assert_eq!(sum(&[Piece::Hole(100_000)]), sum(&[Piece::Data(zeroes)]));
        let (first, behind) = split(Piece::Hole(10), 4);
        assert_eq!((first.len(), behind.map(|piece| piece.len())), (4, Some(6)));
    }
}
