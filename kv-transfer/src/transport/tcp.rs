//! Copies over TCP, with framing of our own, from pool memory to pool memory without a buffer between.
//!
//! `serve` lends an exporter's pool; `TcpTransport` reads into an importer's. A pair of nodes keeps a few
//! connections, each with one read at a time; a connection that was left in the middle of anything is closed, never
//! used again. Everything has a deadline, and whatever a peer sends costs at most its own connection.

mod exporter;
mod importer;
mod wire;

#[cfg(test)]
mod tests;

pub use self::exporter::{TcpExporter, serve};
pub use self::importer::TcpTransport;
use std::time::Duration;

/// Bounds of both sides. The default is what production uses; tests shorten the waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// From the first packet to the exporter's welcome.
    pub connect: Duration,
    /// From a question to its answer.
    pub answer: Duration,
    /// Without one byte of what is owed.
    pub stall: Duration,
    /// Without a question: then the exporter closes.
    pub idle: Duration,
    /// Connections, and so reads at a time, of one importer to one exporter.
    pub n_streams: usize,
    /// Connections that an exporter keeps in all.
    pub n_connections_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            answer: Duration::from_secs(5),
            stall: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            n_streams: 2,
            n_connections_max: 1024,
        }
    }
}

/// Slower than this a read counts as stalled, so that no peer holds blocks by taking a byte now and then.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;

impl Limits {
    /// The longest that moving so many bytes may take in all.
    fn whole(&self, n_bytes: u64) -> Duration {
        self.stall * 2 + Duration::from_secs(n_bytes / BYTES_PER_SECOND_MIN)
    }
}
