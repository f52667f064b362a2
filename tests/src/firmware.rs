//! Disk images for firmware tests. The boot program verifies its own image and reports on the serial port whether it was read completely.
//!
//! A checksum detects lost, duplicated and swapped words. Both programs access the registers of the first serial port directly, without
//! firmware services.

use std::path::Path;
use std::process::Command;

use vm::tool;

use crate::{Context, Result, ensure};

/// Messages for a complete and for a damaged image.
pub const READ_WHOLE: &str = "LUNETTE: READ WHOLE";
const SPOILT: &str = "LUNETTE: SPOILT";

/// File offset of the only section of the PE image; its address in memory is page-aligned.
const HEADERS: usize = 0x200;
const SECTION_AT: usize = 0x1000;

/// Creates a FAT image of `mib` MiB at `path`, without partitions, with an EFI program of `program_mib` MiB at the default boot path of
/// removable media (UEFI 2.10, 3.5.1.1).
pub fn efi_image(path: &Path, mib: u64, program_mib: usize) -> Result<()> {
    let program = tempfile::NamedTempFile::new()?;
    std::fs::write(program.path(), efi_program(program_mib << 20))?;
    std::fs::File::create(path)?.set_len(mib << 20)?;
    let image = path.display().to_string();
    run(Command::new(tool("mformat")?).args(["-i", &image, "-F", "::"]))?;
    for directory in ["::/EFI", "::/EFI/BOOT"] {
        run(Command::new(tool("mmd")?).args(["-i", &image, directory]))?;
    }
    run(Command::new(tool("mcopy")?)
        .args(["-i", &image])
        .arg(program.path())
        .arg("::/EFI/BOOT/BOOTX64.EFI"))
}

/// Creates a disk of 1 MiB at `path` with a boot sector for a PC BIOS. It reads the next 63 blocks by INT 13h.
pub fn bios_image(path: &Path) -> Result<()> {
    const WORDS: usize = 63 * 512 / 4;
    let data: Vec<u32> = (1..=WORDS as u32)
        .map(|n| n.wrapping_mul(0x9e37_79b1))
        .collect();
    let sum = data
        .iter()
        .fold(0u32, |sum, word| sum.wrapping_add(*word).rotate_left(1));
    #[rustfmt::skip]
    let mut code = vec![
        0x31, 0xc0,                         // xor ax, ax
        0x8e, 0xd8,                         // mov ds, ax
        0x8e, 0xc0,                         // mov es, ax
        0x8e, 0xd0,                         // mov ss, ax
        0xbc, 0x00, 0x7c,                   // mov sp, 7c00h
        0xfc,                               // cld
        0xbe, 0x80, 0x7d,                   // mov si, 7d80h: the packet below
        0xb4, 0x42,                         // mov ah, 42h: extended read, of the drive in dl
        0xcd, 0x13,                         // int 13h
        0x66, 0x31, 0xdb,                   // xor ebx, ebx
        0xbe, 0x00, 0x80,                   // mov si, 8000h
        0xb9, (WORDS & 0xff) as u8, (WORDS >> 8) as u8, // mov cx, WORDS
        0x66, 0xad,                         // lodsd
        0x66, 0x01, 0xc3,                   // add ebx, eax
        0x66, 0xd1, 0xc3,                   // rol ebx, 1
        0xe2, 0xf6,                         // loop to lodsd
        0xbe, 0xa0, 0x7d,                   // mov si, 7da0h: the good line
        0x66, 0x81, 0xfb,                   // cmp ebx, sum
    ];
    code.extend(sum.to_le_bytes());
    #[rustfmt::skip]
    code.extend([
        0x74, 0x03,                         // je over the next
        0xbe, 0xd0, 0x7d,                   // mov si, 7dd0h: the bad line
        0xba, 0xfd, 0x03,                   // mov dx, 3fdh: wait until the port takes a byte
        0xec,                               // in al, dx
        0xa8, 0x20,                         // test al, 20h
        0x74, 0xfb,                         // jz to in
        0xba, 0xf8, 0x03,                   // mov dx, 3f8h
        0xac,                               // lodsb
        0xee,                               // out dx, al
        0x3c, 0x0a,                         // cmp al, the line's end
        0x75, 0xef,                         // jne to mov dx
        0xf4,                               // hlt
        0xeb, 0xfd,                         // jmp to hlt
    ]);
    let mut disk = vec![0; 1 << 20];
    disk[..code.len()].copy_from_slice(&code);
    // Disk address packet: 16 bytes, 63 blocks, to 0000:8000, from block 1.
    disk[0x180..0x190].copy_from_slice(&[16, 0, 63, 0, 0, 0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    for (at, line) in [(0x1a0, READ_WHOLE), (0x1d0, SPOILT)] {
        disk[at..at + line.len()].copy_from_slice(line.as_bytes());
        disk[at + line.len()..][..2].copy_from_slice(b"\r\n");
    }
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    for (place, word) in disk[512..].chunks_exact_mut(4).zip(&data) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    Ok(std::fs::write(path, disk)?)
}

/// Builds an EFI application (PE32+) of `bytes`, which are mostly checksummed data.
fn efi_program(bytes: usize) -> Vec<u8> {
    const DATA_AT: usize = 0x100;
    let section = bytes - HEADERS;
    let data: Vec<u64> = (1..=((section - DATA_AT) / 8) as u64)
        .map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .collect();
    let sum = data
        .iter()
        .fold(0u64, |sum, word| sum.wrapping_add(*word).rotate_left(1));
    let mut image = Vec::with_capacity(bytes);
    image.extend(pe_headers(section));
    image.resize(HEADERS, 0);
    let code = efi_code(DATA_AT, data.len(), sum);
    assert!(code.len() <= DATA_AT, "no space left for the code");
    image.extend(code);
    image.resize(HEADERS + DATA_AT, 0);
    image.extend(data.iter().flat_map(|word| word.to_le_bytes()));
    image.resize(bytes, 0);
    image
}

/// Builds the code; `words` of data begin `data_at` bytes after its start.
fn efi_code(data_at: usize, words: usize, sum: u64) -> Vec<u8> {
    let mut code = Vec::new();
    // lea rsi, [rip + data]; the offset counts from the next instruction
    code.extend([0x48, 0x8d, 0x35]);
    code.extend((data_at as u32 - 7).to_le_bytes());
    code.push(0xb9); // mov ecx, words
    code.extend((words as u32).to_le_bytes());
    #[rustfmt::skip]
    code.extend([
        0x31, 0xc0,                         // xor eax, eax
        0x48, 0x03, 0x06,                   // add rax, [rsi]
        0x48, 0xd1, 0xc0,                   // rol rax, 1
        0x48, 0x83, 0xc6, 0x08,             // add rsi, 8
        0xff, 0xc9,                         // dec ecx
        0x75, 0xf2,                         // jnz to add
        0x48, 0xbb,                         // mov rbx, sum
    ]);
    code.extend(sum.to_le_bytes());
    #[rustfmt::skip]
    code.extend([
        0x48, 0x39, 0xd8,                   // cmp rax, rbx
        0x48, 0x8d, 0x35, 29, 0, 0, 0,      // lea rsi, [rip + the good line]
        0x74, 0x07,                         // je over the next
        0x48, 0x8d, 0x35, 41, 0, 0, 0,      // lea rsi, [rip + the bad line]
        0x66, 0xba, 0xfd, 0x03,             // mov dx, 3fdh: wait until the port takes a byte
        0xec,                               // in al, dx
        0xa8, 0x20,                         // test al, 20h
        0x74, 0xfb,                         // jz to in
        0xb2, 0xf8,                         // mov dl, f8h
        0xac,                               // lodsb
        0xee,                               // out dx, al
        0x3c, 0x0a,                         // cmp al, the line's end
        0x75, 0xef,                         // jne to mov dx
        0xf4,                               // hlt
        0xeb, 0xfd,                         // jmp to hlt
    ]);
    for line in [READ_WHOLE, SPOILT] {
        code.extend(line.as_bytes());
        code.extend(b"\r\n");
    }
    code
}

/// Builds the headers of an image with one section of this size, which begins with the entry point.
fn pe_headers(section: usize) -> Vec<u8> {
    let mut bytes = vec![0; 0x40];
    bytes[..2].copy_from_slice(b"MZ");
    bytes[0x3c] = 0x40;
    bytes.extend(b"PE\0\0");
    let mut half = |words: &[u16]| bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    // x86-64, one section, no timestamp, no symbols; an optional header of 240 bytes; executable, large-address aware
    half(&[0x8664, 1, 0, 0, 0, 0, 0, 0, 240, 0x0022]);
    // PE32+
    half(&[0x020b, 0]);
    let memory = section.next_multiple_of(SECTION_AT);
    let word = |bytes: &mut Vec<u8>, words: &[usize]| {
        bytes.extend(words.iter().flat_map(|word| (*word as u32).to_le_bytes()));
    };
    // code, data, zeroed data; entry point and code; image base (8 bytes)
    word(&mut bytes, &[section, 0, 0, SECTION_AT, SECTION_AT, 0, 0]);
    // alignment in memory and in the file; versions; size of the image in memory and of its headers, no checksum
    word(
        &mut bytes,
        &[
            SECTION_AT,
            0x200,
            0,
            0,
            0,
            0,
            SECTION_AT + memory,
            HEADERS,
            0,
        ],
    );
    // an EFI application
    word(&mut bytes, &[10]);
    // stack and heap, reserved and committed (8 bytes each), loader flags, 16 empty directories
    word(&mut bytes, &[0; 9]);
    word(&mut bytes, &[16]);
    bytes.resize(bytes.len() + 16 * 8, 0);
    bytes.extend(b".text\0\0\0");
    word(
        &mut bytes,
        &[section, SECTION_AT, section, HEADERS, 0, 0, 0],
    );
    // executable and readable code; writable because some firmware loads it so
    word(&mut bytes, &[0xe000_0020]);
    bytes
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
