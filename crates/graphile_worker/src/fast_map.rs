//! Maps and sets that the worker looks up for each job: by ids, and by the names of its tasks. Their keys come from the
//! database's sequences and from the application, so they need no protection against chosen keys, which is most of what the
//! standard hasher costs.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<FastHasher>>;
pub(crate) type FastSet<K> = HashSet<K, BuildHasherDefault<FastHasher>>;

/// Multiplies, and mixes the upper half of the product into the lower one: `HashMap` uses bits of both.
#[derive(Default)]
pub(crate) struct FastHasher(u64);

impl FastHasher {
    fn mix(&mut self, value: u64) {
        // 2^64 divided by the golden ratio.
        let product = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

impl Hasher for FastHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(padded));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.mix(value.into());
    }

    fn write_i32(&mut self, value: i32) {
        self.mix(value as u64);
    }

    fn write_i64(&mut self, value: i64) {
        self.mix(value as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map chooses the place of a key by the lowest bits of its hash.
    fn places<K: std::hash::Hash>(keys: impl Iterator<Item = K>) -> usize {
        let place = |key: K| {
            let mut hasher = FastHasher::default();
            key.hash(&mut hasher);
            hasher.finish() % 4096
        };
        keys.map(place).collect::<HashSet<_>>().len()
    }

    #[test]
    fn ids_and_names_spread_over_a_map_whatever_their_distance() {
        for step in [1, 2, 1000, 1024, 1 << 20, 1 << 30] {
            let different = places((0..1000_i64).map(|n| n * step));
            assert!(different > 700, "{different} places for 1000 ids, {step} apart");
        }
        let different = places((0..1000).map(|n| format!("report/{n}")));
        assert!(different > 700, "{different} places for 1000 names");
    }
}
