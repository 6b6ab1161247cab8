//! The identity of cached content: a blake3 chain over (model fingerprint, namespace, tokens), 16 tokens a
//! link, whatever the storage block. Equal hash means equal tokens from the first position on, for one
//! model and one namespace; so a prefix is shared exactly when its last full hash is equal.

use crate::bounds::HASH_BLOCK_TOKENS;
use crate::ids::TokenId;
use crate::planted::PlantedBug;

/// Hash of one full block of tokens and of everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

impl std::fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockHash({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// Hashes of all *full* blocks of `tokens`, in order. A tail of fewer than 16 tokens has no hash.
pub fn block_hashes(
    model_fingerprint: &[u8; 32],
    namespace: &str,
    tokens: &[TokenId],
) -> Vec<BlockHash> {
    let namespace = if PlantedBug::NamespaceForgotten.is_on() {
        ""
    } else {
        namespace
    };
    let mut seed = blake3::Hasher::new();
    seed.update(b"tidemill-block-hash-1");
    seed.update(model_fingerprint);
    seed.update(&(namespace.len() as u64).to_le_bytes());
    seed.update(namespace.as_bytes());
    let mut parent = *seed.finalize().as_bytes();

    let mut hashes = Vec::with_capacity(tokens.len() / HASH_BLOCK_TOKENS);
    for block in tokens.chunks_exact(HASH_BLOCK_TOKENS) {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&parent);
        for token in block {
            hasher.update(&token.to_le_bytes());
        }
        parent = *hasher.finalize().as_bytes();
        let mut short = [0_u8; 16];
        short.copy_from_slice(&parent[..16]);
        hashes.push(BlockHash(short));
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_depends_on_everything_before_it() {
        let model = [7_u8; 32];
        let tokens: Vec<u32> = (0..48).collect();
        let mut other = tokens.clone();
        other[3] = 99;
        let a = block_hashes(&model, "", &tokens);
        let b = block_hashes(&model, "", &other);
        assert_eq!(a.len(), 3);
        assert!(a.iter().zip(&b).all(|(x, y)| x != y));
        assert_eq!(a[..2], block_hashes(&model, "", &tokens[..40])[..]);
        assert_ne!(a, block_hashes(&model, "tenant", &tokens));
        assert_ne!(a, block_hashes(&[8; 32], "", &tokens));
    }
}
