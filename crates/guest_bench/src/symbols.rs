//! Function names of addresses: for the kernel from `/proc/kallsyms`, for programs from the symbols of their files.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use object::{Object, ObjectSegment, ObjectSymbol};

/// Functions of the kernel.
pub struct Kernel {
    functions: Vec<(u64, String)>,
}

impl Kernel {
    /// Reads the functions of the running kernel.
    pub fn read() -> Kernel {
        Kernel::of(&fs::read_to_string("/proc/kallsyms").unwrap_or_default())
    }

    fn of(text: &str) -> Kernel {
        let functions = text.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            let is_text = matches!(words.next()?, "t" | "T" | "w" | "W");
            let name = words.next()?;
            (is_text && address != 0).then(|| (address, name.to_owned()))
        });
        let mut functions: Vec<(u64, String)> = functions.collect();
        functions.sort();
        Kernel { functions }
    }

    /// Returns true if names are available. Without permission for kernel addresses (kernel.kptr_restrict) there are none.
    pub fn has_symbols(&self) -> bool {
        !self.functions.is_empty()
    }

    /// Returns the function of an address.
    pub fn function(&self, address: u64) -> &str {
        let behind = self
            .functions
            .partition_point(|(begin, _)| *begin <= address);
        match behind.checked_sub(1).and_then(|at| self.functions.get(at)) {
            Some((_, name)) => name,
            None => "[kernel]",
        }
    }
}

/// A file mapped into a process.
struct Mapped {
    begin: u64,
    end: u64,
    offset: u64,
    path: String,
}

/// Functions of a file by address in the file.
#[derive(Default)]
struct Functions(Vec<(u64, u64, String)>);

/// Programs found so far.
#[derive(Default)]
pub struct Programs {
    mapped: HashMap<u32, Vec<Mapped>>,
    files: HashMap<String, (Functions, Vec<[u64; 3]>)>,
}

impl Programs {
    /// Returns the function of an address in a process as `FILE:FUNCTION`, or only the file if it has no symbols.
    pub fn function(&mut self, pid: u32, address: u64) -> String {
        let mapped = self.mapped.entry(pid).or_insert_with(|| maps(pid));
        let Some(found) = mapped
            .iter()
            .find(|mapped| (mapped.begin..mapped.end).contains(&address))
        else {
            return "[program]".to_owned();
        };
        if found.path.starts_with('[') {
            return found.path.clone();
        }
        let file = Path::new(&found.path).file_name();
        let file = file.map_or("[memory]".into(), |name| name.to_string_lossy());
        let path = format!("/proc/{pid}/root{}", found.path);
        let (functions, segments) = self
            .files
            .entry(found.path.clone())
            .or_insert_with(|| symbols(Path::new(&path)));
        let at = address - found.begin + found.offset;
        let inside = segments
            .iter()
            .find(|[offset, size, _]| (*offset..offset + size).contains(&at));
        let name = inside.and_then(|[offset, _, begin]| functions.at(at - offset + begin));
        match name {
            Some(name) => format!("{file}:{name}").replace([';', ' '], "_"),
            None => format!("[{file}]").replace([';', ' '], "_"),
        }
    }
}

impl Functions {
    fn at(&self, address: u64) -> Option<&str> {
        let behind = self.0.partition_point(|(begin, ..)| *begin <= address);
        let (begin, size, name) = self.0.get(behind.checked_sub(1)?)?;
        (address - begin < (*size).max(1)).then_some(name)
    }
}

/// Reads the executable mappings from `/proc/PID/maps`.
fn maps(pid: u32) -> Vec<Mapped> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| {
        let mut words = line.splitn(6, ' ');
        let (begin, end) = words.next()?.split_once('-')?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let is_run = words.next()?.contains('x');
        let offset = hex(words.next()?)?;
        let path = words.nth(2)?.trim();
        (is_run && path.starts_with(['/', '['])).then_some(Mapped {
            begin: hex(begin)?,
            end: hex(end)?,
            offset,
            path: path.to_owned(),
        })
    });
    lines.collect()
}

/// Reads a file's functions and its segments: offset, size, address. An unreadable file has none.
fn symbols(path: &Path) -> (Functions, Vec<[u64; 3]>) {
    let Ok(bytes) = fs::read(path) else {
        return Default::default();
    };
    let Ok(file) = object::File::parse(&*bytes) else {
        return Default::default();
    };
    let named = file.symbols().chain(file.dynamic_symbols());
    let mut functions: Vec<(u64, u64, String)> = named
        .filter(|symbol| symbol.kind() == object::SymbolKind::Text && symbol.address() != 0)
        .filter_map(|symbol| {
            let name = format!("{:#}", rustc_demangle::demangle(symbol.name().ok()?));
            Some((symbol.address(), symbol.size(), name))
        })
        .collect();
    functions.sort();
    functions.dedup_by_key(|function| function.0);
    let segments = file.segments().map(|segment| {
        let (offset, size) = segment.file_range();
        [offset, size, segment.address()]
    });
    (Functions(functions), segments.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_in_the_function_that_begins_before_it() {
        let kernel = Kernel::of(
            "ffffffff81000000 T _text\nffffffff81000100 t virtio_queue_rq\t[virtio_blk]\n0000000000000000 D x\nffffffff81000200 d data\n",
        );
        assert_eq!(kernel.function(0xffff_ffff_8100_0180), "virtio_queue_rq");
        assert_eq!(kernel.function(0xffff_ffff_8100_0004), "_text");
        assert_eq!(kernel.function(0x1000), "[kernel]");
        assert!(kernel.has_symbols() && !Kernel::of("").has_symbols());
    }

    #[test]
    fn a_function_of_this_program_has_its_name() {
        let address = an_address_is_in_the_function_that_begins_before_it as *const () as u64;
        let name = Programs::default().function(std::process::id(), address + 1);
        assert!(name.contains("an_address_is_in_the_function"), "{name}");
    }
}
