//! Types of values: how a key reads them, and how they are written in files and bodies of the API.

use std::net::SocketAddr;
use std::path::PathBuf;

use block::{
    CacheMode, DelayTime, DiscardMode, FileLock, ImageName, NamedFiles, OnError,
    PassedReservations, PollLimit, PollMode, RbdLock,
};
use iscsi::access::{DemoMode, Network};
use iscsi::address::UnitAddress;
use iscsi::negotiation::DigestOffer;
use nbd::address::ExportAddress;
use serde_json::{Value, json};

use super::devices::{DelayStorage, Persist};
use super::key::{Key, Kind, POLL_ALLOWED, allow, words};
use super::location::Located;
use super::model::POLL_MICROS_MAX;
use super::value::{Raw, Reader};

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

/// Implements [`Setting`] for types that are written as one text. An error without a reason shows the text.
macro_rules! texts {
    ($($type:ty = $parse:expr),+ $(,)?) => {
        $(impl Setting for $type {
            fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
                key.parsed(reader, $parse)
            }

            fn value(&self) -> Option<Value> {
                Some(json!(self.to_string()))
            }
        })+
    };
}

texts! {
    DelayTime = |text| DelayTime::parse(text).ok_or_else(String::new),
    ExportAddress = str::parse,
    ImageName = |text| ImageName::parse(text).ok_or_else(String::new),
    Network = str::parse,
    SocketAddr = |text| text.parse().map_err(|_| format!("{text:?} is not an address with a port")),
    String = |text| Ok(text.to_owned()),
    // In a flag the disk's kind precedes it: d0=iscsi://HOST/TARGET/LUN.
    UnitAddress = |text| match text.starts_with("//") {
        true => format!("iscsi:{text}").parse(),
        false => text.parse(),
    }
    .map_err(|_| String::new()),
}

impl Setting for PathBuf {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        key.parsed(reader, |path| {
            allow(!path.contains('\0')).map(|()| path.into())
        })
    }

    fn value(&self) -> Option<Value> {
        Some(json!(self.to_string_lossy()))
    }
}

impl Setting for PollLimit {
    fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
        let value = reader.raw(key.name)?;
        let micros = match &value.value {
            Raw::Word(text) => text.parse().ok(),
            Raw::Integer(number) => u32::try_from(*number).ok(),
            _ => None,
        };
        let limit = match (&value.value, micros) {
            (Raw::Text(text) | Raw::Word(text), _) if text == "always" => PollLimit::Always,
            (_, Some(0)) => PollLimit::Never,
            (_, Some(micros @ 1..=POLL_MICROS_MAX)) => PollLimit::Micros(micros),
            _ => {
                reader.refuse(key.name, value, POLL_ALLOWED);
                return None;
            }
        };
        Some(Located::new(limit, value.location.clone()))
    }

    fn value(&self) -> Option<Value> {
        Some(match self {
            PollLimit::Never => json!(0),
            PollLimit::Micros(micros) => json!(micros),
            PollLimit::Always => json!("always"),
        })
    }
}

/// Implements [`Setting`] for integers. The range of the key must fit into the type.
macro_rules! integers {
    ($($integer:ty),+) => {
        $(impl Setting for $integer {
            fn read<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Located<Self>> {
                let at = key.number(reader)?;
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
                // A key may allow some of the words only.
                let is_allowed = |word: &str| matches!(key.kind, Kind::Word(words) if words.contains(&word));
                let words = $words.into_iter().filter(|(word, _)| is_allowed(word));
                reader.choice(key.name, &words.collect::<Vec<_>>())
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
    DelayStorage = [("null", DelayStorage::Null), ("ram", DelayStorage::Ram)],
    DemoMode = [("none", DemoMode::None), ("ro", DemoMode::ReadOnly), ("rw", DemoMode::ReadWrite)],
    // The initiator offers digests first; the target selects its preference if permitted (RFC 7143, 6.2.1).
    DigestOffer = [("any", DigestOffer::PreferNone), ("none", DigestOffer::None), ("crc32c", DigestOffer::Crc32c)],
    DiscardMode = DiscardMode::WORDS,
    FileLock = FileLock::WORDS,
    NamedFiles = NamedFiles::WORDS,
    OnError = OnError::WORDS,
    PassedReservations = [
        ("refuse", PassedReservations::Refuse),
        ("emulate", PassedReservations::Emulate),
        ("forward", PassedReservations::Forward),
    ],
    Persist = [("none", Persist::None), ("memfd", Persist::Memfd)],
    PollMode = PollMode::WORDS,
    RbdLock = RbdLock::WORDS,
    sandbox::Mode = sandbox::Mode::WORDS,
}
