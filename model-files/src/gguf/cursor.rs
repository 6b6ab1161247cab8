//! A read position in untrusted bytes. Nothing is read, sized or counted without a look at what is left.

use crate::error::Refusal;

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    fn n_left(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `n` bytes; `field` is what the message names.
    pub(super) fn take(&mut self, n: usize, field: &str) -> Result<&'a [u8], Refusal> {
        if n > self.n_left() {
            return Err(Refusal::new(
                field,
                format!(
                    "{n} bytes expected at offset {}, but {} are left; the file is truncated",
                    self.position,
                    self.n_left()
                ),
            ));
        }
        let taken = &self.bytes[self.position..self.position + n];
        self.position += n;
        Ok(taken)
    }

    pub(super) fn u32(&mut self, field: &str) -> Result<u32, Refusal> {
        let mut value = [0_u8; 4];
        value.copy_from_slice(self.take(4, field)?);
        Ok(u32::from_le_bytes(value))
    }

    pub(super) fn u64(&mut self, field: &str) -> Result<u64, Refusal> {
        let mut value = [0_u8; 8];
        value.copy_from_slice(self.take(8, field)?);
        Ok(u64::from_le_bytes(value))
    }

    /// A count of things of at least `unit_bytes` bytes each, so that it bounds what may be allocated for them.
    pub(super) fn count(&mut self, field: &str, unit_bytes: usize) -> Result<usize, Refusal> {
        let count = self.u64(field)?;
        let most = self.n_left() / unit_bytes;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(Refusal::new(
                field,
                format!("a count of {count}, but the bytes left hold at most {most}"),
            )),
        }
    }

    pub(super) fn string(&mut self, field: &str) -> Result<&'a str, Refusal> {
        let n_bytes = self.count(field, 1)?;
        let start = self.position;
        std::str::from_utf8(self.take(n_bytes, field)?)
            .map_err(|_| Refusal::new(field, format!("text at offset {start} is not UTF-8")))
    }
}
