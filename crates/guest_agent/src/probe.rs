//! Single I/Os that report their result: number of bytes, or errno.

use crate::args::Args;
use crate::block_file::{self, Buffer};
use serde_json::json;
use std::os::unix::fs::FileExt;

/// Runs one read, write or flush. A failed I/O is a result, not an error of this program.
pub fn one(args: &Args) -> Result<bool, String> {
    let op = args.text("op")?;
    let (offset, length) = (args.number("offset", 0)?, args.number("length", 512)?);
    let file = match block_file::open(args, op != "read") {
        Ok(file) => file,
        Err(problem) => {
            println!("{}", json!({ "open": problem }));
            return Ok(true);
        }
    };
    let mut buffer = Buffer::new(length as usize);
    let outcome = match op {
        "read" => file.read_at(buffer.bytes_mut(), offset),
        "write" => file.write_at(buffer.bytes(), offset),
        "flush" => file.sync_all().map(|()| 0),
        _ => return Err(format!("--op {op}: allowed are read, write, flush")),
    };
    println!(
        "{}",
        match outcome {
            Ok(bytes) => json!({ "bytes": bytes }),
            Err(error) => json!({ "errno": error.raw_os_error(), "text": error.to_string() }),
        }
    );
    Ok(true)
}

/// Reads a range and reports the offset of the first nonzero byte.
pub fn zeroes(args: &Args) -> Result<bool, String> {
    let file = block_file::open(args, false)?;
    let start = args.number("offset", 0)?;
    let end = start
        + args.number(
            "length",
            block_file::size(args, &file)?.saturating_sub(start),
        )?;
    let mut buffer = Buffer::new(1 << 20);
    let mut offset = start;
    while offset < end {
        let length = (end - offset).min(buffer.bytes().len() as u64) as usize;
        let bytes = &mut buffer.bytes_mut()[..length];
        file.read_exact_at(bytes, offset)
            .map_err(|error| format!("read at offset {offset}: {error}"))?;
        if let Some(index) = bytes.iter().position(|&byte| byte != 0) {
            println!(
                "{}",
                json!({ "zeroes": false, "first": offset + index as u64 })
            );
            return Ok(false);
        }
        offset += length as u64;
    }
    println!("{}", json!({ "zeroes": true }));
    Ok(true)
}
