//! Identities. Each is a type of its own, so that a block index never stands where a token belongs.
//!
//! Ids that name one *life* of something (request, incarnation, capability) are 128 random bits, made
//! by their owner and never reused: an old message can then never act on a new thing.

use std::fmt;

/// A token of the served model's vocabulary.
pub type TokenId = u32;

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u128);

        impl $name {
            /// Draws 128 bits from the operating system.
            pub fn random() -> Self {
                let mut bytes = [0_u8; 16];
                getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
                Self(u128::from_le_bytes(bytes))
            }
        }
    };
}

random_id!(
    /// One request of a client. Ours, never the client's own label.
    RequestId
);
random_id!(
    /// One life of a node: new at every start, also at the same address.
    Incarnation
);
random_id!(
    /// The right to read one request's exported blocks. A secret: never printed.
    Capability
);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({:032x})", self.0)
    }
}

impl std::str::FromStr for RequestId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(text, 16).map(Self)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incarnation({:032x})", self.0)
    }
}

impl fmt::Debug for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Capability(hidden)")
    }
}

/// A node's name within one deployment, e.g. `prefill-0`. Stable over restarts; the incarnation is not.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(String);

impl NodeId {
    /// Longest node id in bytes.
    pub const BYTES_MAX: usize = 128;

    /// Accepts 1 to 128 characters out of `[A-Za-z0-9._:-]`.
    ///
    /// # Errors
    /// Returns the reason in words when the name is empty, too long or has another character.
    pub fn new(name: impl Into<String>) -> Result<Self, String> {
        let name = name.into();
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
        if name.is_empty() || name.len() > Self::BYTES_MAX {
            return Err(format!(
                "node id has {} bytes; 1 to {} are allowed",
                name.len(),
                Self::BYTES_MAX
            ));
        }
        if !name.chars().all(allowed) {
            return Err(format!(
                "node id {name:?} has a character outside [A-Za-z0-9._:-]"
            ));
        }
        Ok(Self(name))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Index of a block in one node's block pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockIdx(pub u32);

/// Index of a layer group within a KV layout.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LayerGroupIdx(pub u32);

/// Which claim of a capability is meant. A rebind raises it and so voids every earlier claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Epoch(pub u32);

/// One read of exported blocks, unique within the exporter's incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ReadId(pub u64);

/// One call that a peer has made to this process (a stream or a question): what an answer is addressed to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct CallId(pub u64);

/// Checksum (xxh3, 64 bits) of one slice's bytes. Guards against faults, not against attackers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Digest(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_is_never_printed() {
        assert_eq!(format!("{:?}", Capability(0x1234)), "Capability(hidden)");
    }

    #[test]
    fn node_ids_are_bounded() {
        assert!(NodeId::new("prefill-0").is_ok());
        assert!(NodeId::new("").is_err());
        assert!(NodeId::new("a".repeat(129)).is_err());
        assert!(NodeId::new("a b").is_err());
    }

    #[test]
    fn request_ids_read_back() {
        let id = RequestId::random();
        assert_eq!(id.to_string().parse::<RequestId>(), Ok(id));
    }
}
