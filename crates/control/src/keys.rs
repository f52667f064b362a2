//! Keys of an object with their values, in order. The daemon interprets them.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Keys and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys(pub Vec<(String, Value)>);

impl Keys {
    /// Returns the value of a key, if it is present.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let mut keys = self.0.iter();
        keys.find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Returns the value of a key that is a string.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    /// Returns the value of a key that is a number.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// Returns true if the value of a key is `true`.
    pub fn is_on(&self, key: &str) -> bool {
        self.get(key) == Some(&Value::Bool(true))
    }
}

impl Serialize for Keys {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Keys, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Keys;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Keys, A::Error> {
                let mut keys = Keys::default();
                while let Some(member) = members.next_entry()? {
                    keys.0.push(member);
                }
                Ok(keys)
            }
        }

        deserializer.deserialize_map(Members)
    }
}
