//! What travels on a `tcp` connection, byte by byte.
//!
//! A frame is a head (magic, version, kind, body length; 8 bytes) and a body of bounded length, all little-endian.
//! The importer says `Hello`, the exporter `Welcome` or `Refused`; then each `Read` is answered by `Data` (followed
//! by exactly the announced number of raw bytes, in the order asked) or `Refused`. Decoding is a pure function over
//! bytes that come from anybody: it never panics, never allocates by a length that it has not bounded, and
//! accepts exactly what encoding gives.

use tidemill_core::kv_layout::PROTOCOL_REVISION;
use tidemill_core::{
    Capability, Epoch, Failure, FailureCode, Incarnation, KvDtype, KvLayout, LayerGroupIdx,
    RequestId, Slice,
};

use crate::export::READ_SLICES_MAX;

/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 8;
/// Most bytes of a body: a `Read` of the most slices.
pub const BODY_BYTES_MAX: usize = READ_FIXED_BYTES + READ_SLICES_MAX * SLICE_BYTES;
/// Most bytes of the words in a refusal.
pub const MESSAGE_BYTES_MAX: usize = 1024;

const MAGIC: [u8; 2] = *b"KV";
const READ_FIXED_BYTES: usize = 16 + 16 + 4 + 16 + 4;
const SLICE_BYTES: usize = 8;

/// Why bytes are not a frame.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// Not our protocol at all.
    #[error("magic is {0:02x?}; \"KV\" was expected")]
    Magic([u8; 2]),
    /// Another revision of it.
    #[error("version is {version}; this node speaks {PROTOCOL_REVISION}")]
    Version {
        /// What came.
        version: u8,
    },
    /// A kind that does not exist.
    #[error("kind is {0}; 1 to 5 exist")]
    Kind(u8),
    /// A kind that does not belong here.
    #[error("a {came} frame came where {expected} was expected")]
    Unexpected {
        /// What came.
        came: &'static str,
        /// What may come.
        expected: &'static str,
    },
    /// A length that its kind does not allow.
    #[error("{field} is {value}; {bound} is allowed")]
    Length {
        /// Which length.
        field: &'static str,
        /// What came.
        value: u64,
        /// What may come.
        bound: String,
    },
    /// A field that does not hold.
    #[error("{field} does not hold: {reason}")]
    Field {
        /// Which.
        field: &'static str,
        /// Why.
        reason: String,
    },
}

/// The first bytes of every frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    kind: u8,
    body_bytes: u32,
}

impl Head {
    /// Bytes of the body that follows.
    pub fn body_bytes(self) -> usize {
        self.body_bytes as usize
    }
}

/// The importer introduces itself and says whom it means.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The exporter's life that is meant.
    pub exporter: Incarnation,
    /// The importer's life.
    pub importer: Incarnation,
    /// The importer's layout, whole, so that a refusal can name what differs.
    pub layout: KvLayout,
}

/// A frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// Importer, first.
    Hello(Hello),
    /// Exporter: the pair may exchange slices.
    Welcome {
        /// The exporter's life.
        exporter: Incarnation,
    },
    /// Importer: read these.
    Read(Read),
    /// Exporter: so many raw bytes follow.
    Data {
        /// Raw bytes behind this frame.
        n_bytes: u64,
    },
    /// Exporter: no.
    Refused(Failure),
}

/// A wish to read; the connection's hello says whose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Read {
    /// Whose KV.
    pub request_id: RequestId,
    /// The right to it.
    pub capability: Capability,
    /// Under which epoch.
    pub epoch: Epoch,
    /// The importer's life.
    pub importer: Incarnation,
    /// What, in this order.
    pub slices: Vec<Slice>,
}

impl Frame {
    /// The kind in words.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Welcome { .. } => "welcome",
            Self::Read(_) => "read",
            Self::Data { .. } => "data",
            Self::Refused(_) => "refused",
        }
    }

    /// The frame as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let kind = match self {
            Self::Hello(hello) => {
                put_hello(&mut body, hello);
                1
            }
            Self::Welcome { exporter } => {
                body.extend(exporter.0.to_le_bytes());
                2
            }
            Self::Read(read) => {
                put_read(&mut body, read);
                3
            }
            Self::Data { n_bytes } => {
                body.extend(n_bytes.to_le_bytes());
                4
            }
            Self::Refused(failure) => {
                body.push(failure_number(failure.code));
                body.extend(shorten(&failure.message).as_bytes());
                5
            }
        };
        let body_bytes = u32::try_from(body.len()).expect("bodies are bounded");
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
        bytes.extend(MAGIC);
        bytes.push(version());
        bytes.push(kind);
        bytes.extend(body_bytes.to_le_bytes());
        bytes.extend(body);
        bytes
    }
}

/// Decodes a head and bounds the body that it announces.
///
/// # Errors
/// Names the field that does not hold.
pub fn parse_head(bytes: [u8; HEAD_BYTES]) -> Result<Head, FrameError> {
    let [m0, m1, came, kind, l0, l1, l2, l3] = bytes;
    if [m0, m1] != MAGIC {
        return Err(FrameError::Magic([m0, m1]));
    }
    if came != version() {
        return Err(FrameError::Version { version: came });
    }
    let body_bytes = u32::from_le_bytes([l0, l1, l2, l3]);
    let (min, max) = match kind {
        1 => (HELLO_BYTES, HELLO_BYTES),
        2 => (16, 16),
        3 => (READ_FIXED_BYTES + SLICE_BYTES, BODY_BYTES_MAX),
        4 => (8, 8),
        5 => (1, 1 + MESSAGE_BYTES_MAX),
        other => return Err(FrameError::Kind(other)),
    };
    if !(min..=max).contains(&(body_bytes as usize)) {
        return Err(FrameError::Length {
            field: "body length",
            value: u64::from(body_bytes),
            bound: format!("{min} to {max}"),
        });
    }
    Ok(Head { kind, body_bytes })
}

/// Decodes the body behind `head`.
///
/// # Errors
/// Names the field that does not hold.
pub fn parse_body(head: Head, body: &[u8]) -> Result<Frame, FrameError> {
    let mut rest = Reader(body);
    let frame = match head.kind {
        1 => Frame::Hello(take_hello(&mut rest)?),
        2 => Frame::Welcome {
            exporter: Incarnation(rest.u128("exporter")?),
        },
        3 => Frame::Read(take_read(&mut rest)?),
        4 => Frame::Data {
            n_bytes: rest.u64("n_bytes")?,
        },
        5 => Frame::Refused(take_refusal(&mut rest)?),
        other => return Err(FrameError::Kind(other)),
    };
    let n_left = rest.0.len();
    if n_left > 0 {
        return Err(FrameError::Length {
            field: "bytes behind the last field",
            value: n_left as u64,
            bound: "0".into(),
        });
    }
    Ok(frame)
}

/// Decodes one whole frame: the door for tests and fuzzers.
///
/// # Errors
/// Names the field that does not hold, also for bytes that are missing or left over.
pub fn parse_frame(bytes: &[u8]) -> Result<Frame, FrameError> {
    let Some((head, body)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
        return Err(FrameError::Length {
            field: "frame length",
            value: bytes.len() as u64,
            bound: format!("{HEAD_BYTES} or more"),
        });
    };
    let head = parse_head(*head)?;
    if body.len() != head.body_bytes() {
        return Err(FrameError::Length {
            field: "bytes behind the head",
            value: body.len() as u64,
            bound: head.body_bytes().to_string(),
        });
    }
    parse_body(head, body)
}

fn version() -> u8 {
    u8::try_from(PROTOCOL_REVISION).expect("the revision is small")
}

const HELLO_BYTES: usize = 16 + 16 + 6 * 4 + 1 + 32 + 16;

fn put_hello(body: &mut Vec<u8>, hello: &Hello) {
    let layout = &hello.layout;
    body.extend(hello.exporter.0.to_le_bytes());
    body.extend(hello.importer.0.to_le_bytes());
    for field in [
        layout.n_layers,
        layout.n_kv_heads,
        layout.head_dim,
        layout.block_tokens,
        layout.group_layers,
        layout.tp_degree,
    ] {
        body.extend(field.to_le_bytes());
    }
    body.push(match layout.dtype {
        KvDtype::F16 => 1,
        KvDtype::Bf16 => 2,
        KvDtype::F32 => 3,
    });
    body.extend(layout.model_fingerprint);
    body.extend(layout.fingerprint());
}

fn take_hello(rest: &mut Reader<'_>) -> Result<Hello, FrameError> {
    let exporter = Incarnation(rest.u128("exporter")?);
    let importer = Incarnation(rest.u128("importer")?);
    let layout = KvLayout {
        n_layers: rest.u32("n_layers")?,
        n_kv_heads: rest.u32("n_kv_heads")?,
        head_dim: rest.u32("head_dim")?,
        block_tokens: rest.u32("block_tokens")?,
        group_layers: rest.u32("group_layers")?,
        tp_degree: rest.u32("tp_degree")?,
        dtype: match rest.bytes::<1>("dtype")? {
            [1] => KvDtype::F16,
            [2] => KvDtype::Bf16,
            [3] => KvDtype::F32,
            [other] => {
                return Err(FrameError::Field {
                    field: "dtype",
                    reason: format!("{other} is none of 1 (f16), 2 (bf16), 3 (f32)"),
                });
            }
        },
        model_fingerprint: rest.bytes("model_fingerprint")?,
    };
    layout.check().map_err(|error| FrameError::Field {
        field: "layout",
        reason: error.to_string(),
    })?;
    // The fingerprint also covers the revisions of the numerics, which the fields do not.
    if rest.bytes::<16>("layout_fingerprint")? != layout.fingerprint() {
        return Err(FrameError::Field {
            field: "layout_fingerprint",
            reason: "the peer's numerics revision differs; both nodes need the same release".into(),
        });
    }
    Ok(Hello {
        exporter,
        importer,
        layout,
    })
}

fn put_read(body: &mut Vec<u8>, read: &Read) {
    body.extend(read.request_id.0.to_le_bytes());
    body.extend(read.capability.0.to_le_bytes());
    body.extend(read.epoch.0.to_le_bytes());
    body.extend(read.importer.0.to_le_bytes());
    let n_slices = u32::try_from(read.slices.len()).expect("reads are bounded");
    body.extend(n_slices.to_le_bytes());
    for slice in &read.slices {
        body.extend(slice.ordinal.to_le_bytes());
        body.extend(slice.group.0.to_le_bytes());
    }
}

fn take_read(rest: &mut Reader<'_>) -> Result<Read, FrameError> {
    let request_id = RequestId(rest.u128("request_id")?);
    let capability = Capability(rest.u128("capability")?);
    let epoch = Epoch(rest.u32("epoch")?);
    let importer = Incarnation(rest.u128("importer")?);
    let n_slices = rest.u32("n_slices")? as usize;
    if n_slices == 0 || n_slices > READ_SLICES_MAX || rest.0.len() != n_slices * SLICE_BYTES {
        return Err(FrameError::Length {
            field: "n_slices",
            value: n_slices as u64,
            bound: format!("1 to {READ_SLICES_MAX}, each with 8 bytes behind it,"),
        });
    }
    let slices = (0..n_slices)
        .map(|_| {
            Ok(Slice {
                ordinal: rest.u32("ordinal")?,
                group: LayerGroupIdx(rest.u32("group")?),
            })
        })
        .collect::<Result<_, FrameError>>()?;
    Ok(Read {
        request_id,
        capability,
        epoch,
        importer,
        slices,
    })
}

fn take_refusal(rest: &mut Reader<'_>) -> Result<Failure, FrameError> {
    let [number] = rest.bytes::<1>("code")?;
    let code = FAILURES
        .iter()
        .find(|(_, known)| *known == number)
        .map(|(code, _)| *code)
        .ok_or_else(|| FrameError::Field {
            field: "code",
            reason: format!("{number} is unknown"),
        })?;
    let text = std::str::from_utf8(rest.0).map_err(|error| FrameError::Field {
        field: "message",
        reason: error.to_string(),
    })?;
    let message = text.to_owned();
    rest.0 = &[];
    Ok(Failure { code, message })
}

/// Failure codes on the wire.
const FAILURES: [(FailureCode, u8); 11] = [
    (FailureCode::InvalidRequest, 1),
    (FailureCode::ContextLengthExceeded, 2),
    (FailureCode::Overloaded, 3),
    (FailureCode::DeadlineExceeded, 4),
    (FailureCode::Cancelled, 5),
    (FailureCode::Gone, 6),
    (FailureCode::TransferFailed, 7),
    (FailureCode::Draining, 8),
    (FailureCode::Unavailable, 9),
    (FailureCode::NumericFault, 10),
    (FailureCode::Internal, 11),
];

fn failure_number(code: FailureCode) -> u8 {
    FAILURES
        .iter()
        .find(|(known, _)| *known == code)
        .map(|(_, number)| *number)
        .expect("the table has every code")
}

/// The longest prefix that fits and is whole characters.
fn shorten(message: &str) -> &str {
    let mut end = message.len().min(MESSAGE_BYTES_MAX);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], FrameError> {
        let Some((first, rest)) = self.0.split_first_chunk::<N>() else {
            return Err(FrameError::Length {
                field,
                value: self.0.len() as u64,
                bound: format!("{N} bytes"),
            });
        };
        self.0 = rest;
        Ok(*first)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, FrameError> {
        self.bytes(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, FrameError> {
        self.bytes(field).map(u64::from_le_bytes)
    }

    fn u128(&mut self, field: &'static str) -> Result<u128, FrameError> {
        self.bytes(field).map(u128::from_le_bytes)
    }
}

#[cfg(test)]
mod tests;
