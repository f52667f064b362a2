//! Types of values: how a key reads them, and how they are written in files and bodies of the API.

use std::net::SocketAddr;
use std::path::PathBuf;

use block::{
    CacheMode, DelayTime, DiscardMode, FileLock, NamedFiles, OnError, PassedReservations,
    PollLimit, PollMode, RbdLock,
};
use iscsi::access::DemoMode;
use iscsi::negotiation::DigestOffer;
use serde_json::{Value, json};

use super::devices::{DelayStorage, ExportCache, Persist};
use super::key::{Key, Kind, words};
use super::location::Located;
use super::readers::read_poll;
use super::value::Reader;

impl<D, T> Key<D, T> {
    /// Reads the value into `place`, which is unchanged if the key is absent or its value is wrong.
    pub fn set<S: Setting>(&self, reader: &mut Reader<'_, '_>, place: &mut S) {
        if let Some(at) = S::read(self, reader) {
            *place = at.value;
        }
    }
}

/// Declares a key, with each part once. `set PATH` reads into this field of the draft, and `both PATH` also returns the value of this field
/// of the object.
macro_rules! key {
    (@of) => { &[] };
    (@of $of:expr) => { $of };
    (@read both $($path:ident).+) => { |key, reader, draft| key.set(reader, &mut draft.$($path).+) };
    (@get both $($path:ident).+) => { |object| $crate::setting::Setting::value(&object.$($path).+) };
    (@read set $($path:ident).+; get $get:expr) => { |key, reader, draft| key.set(reader, &mut draft.$($path).+) };
    (@get set $($path:ident).+; get $get:expr) => { $get };
    (@read read $read:expr; get $get:expr) => { $read };
    (@get read $read:expr; get $get:expr) => { $get };
    ($name:literal: $kind:expr; $default:expr; $run_time:expr $(, of $of:expr)?; $help:expr; $($access:tt)+) => {
        $crate::key::Key {
            name: $name,
            kind: $kind,
            default: $default,
            run_time: $run_time,
            of: $crate::setting::key!(@of $($of)?),
            help: $help,
            read: $crate::setting::key!(@read $($access)+),
            get: $crate::setting::key!(@get $($access)+),
        }
    };
}
pub(crate) use key;

/// A type of values.
pub trait Setting: Sized {
    /// Reads the value of a key. `None`: the key is absent, or its value is wrong and was reported.
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>>;

    /// Returns the value as it is written; `None` if it is not set.
    fn value(&self) -> Option<Value>;

    /// Returns the value as it is written, unless it is the default.
    fn value_unless(&self, default: &Self) -> Option<Value>
    where
        Self: PartialEq,
    {
        (self != default).then(|| self.value()).flatten()
    }
}

impl<S: Setting> Setting for Option<S> {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        let at = S::read(key, reader)?;
        Some(Located::new(Some(at.value), at.location))
    }

    fn value(&self) -> Option<Value> {
        self.as_ref()?.value()
    }
}

impl<S: Setting> Setting for Located<S> {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        let at = S::read(key, reader)?;
        let location = at.location.clone();
        Some(Located::new(at, location))
    }

    fn value(&self) -> Option<Value> {
        self.value.value()
    }
}

impl Setting for bool {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        reader.boolean(key.name)
    }

    fn value(&self) -> Option<Value> {
        Some(json!(self))
    }
}

impl Setting for String {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        key.text(reader)
    }

    fn value(&self) -> Option<Value> {
        Some(json!(self))
    }
}

impl Setting for PathBuf {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        let at = key.text(reader)?;
        Some(Located::new(at.value.into(), at.location))
    }

    fn value(&self) -> Option<Value> {
        Some(json!(self.to_string_lossy()))
    }
}

impl Setting for SocketAddr {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        super::readers::read_address(reader, key.name)
    }

    fn value(&self) -> Option<Value> {
        Some(json!(self.to_string()))
    }
}

impl Setting for PollLimit {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        read_poll(reader, key.name)
    }

    fn value(&self) -> Option<Value> {
        Some(match self {
            PollLimit::Never => json!(0),
            PollLimit::Micros(micros) => json!(micros),
            PollLimit::Always => json!("always"),
        })
    }
}

impl Setting for DelayTime {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        let text = key.text(reader)?;
        match DelayTime::parse(&text.value) {
            Some(time) => Some(Located::new(time, text.location)),
            None => {
                key.refuse(reader, &text);
                None
            }
        }
    }

    fn value(&self) -> Option<Value> {
        Some(json!(self.to_string()))
    }
}

/// Implements [`Setting`] for integers. The range of the key must fit into the type.
macro_rules! integers {
    ($($integer:ty),+) => {
        $(impl Setting for $integer {
            fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
                let at = match key.kind {
                    Kind::Size(..) => key.size(reader),
                    _ => key.number(reader),
                }?;
                Some(Located::new(<$integer>::try_from(at.value).ok()?, at.location))
            }

            fn value(&self) -> Option<Value> {
                Some(json!(self))
            }
        })+
    };
}

integers!(u8, u16, u32, u64, usize);

/// A type with a word for each value.
pub trait Choice: Copy + PartialEq + 'static {
    /// Kind of the key's values.
    const KIND: Kind;
}

/// Implements [`Choice`] and [`Setting`] for types with a list of words.
macro_rules! choices {
    ($($choice:ty = $words:expr),+ $(,)?) => {
        $(impl Choice for $choice {
            const KIND: Kind = Kind::Word(&const { words(&$words) });
        }

        impl Setting for $choice {
            fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
                reader.choice(key.name, &$words)
            }

            fn value(&self) -> Option<Value> {
                let words = $words;
                let word = words.iter().find(|(_, value)| value == self);
                word.map(|(word, _)| json!(word))
            }
        })+
    };
}

choices! {
    CacheMode = CacheMode::WORDS,
    DelayStorage = DelayStorage::WORDS,
    DemoMode = [("none", DemoMode::None), ("ro", DemoMode::ReadOnly), ("rw", DemoMode::ReadWrite)],
    // The initiator offers digests first; the target selects its preference if permitted (RFC 7143, 6.2.1).
    DigestOffer = [("any", DigestOffer::PreferNone), ("none", DigestOffer::None), ("crc32c", DigestOffer::Crc32c)],
    DiscardMode = DiscardMode::WORDS,
    ExportCache = ExportCache::WORDS,
    FileLock = FileLock::WORDS,
    NamedFiles = NamedFiles::WORDS,
    OnError = OnError::WORDS,
    PassedReservations = [
        ("refuse", PassedReservations::Refuse),
        ("emulate", PassedReservations::Emulate),
        ("forward", PassedReservations::Forward),
    ],
    Persist = Persist::WORDS,
    PollMode = PollMode::WORDS,
    RbdLock = RbdLock::WORDS,
    sandbox::Mode = sandbox::Mode::WORDS,
}
