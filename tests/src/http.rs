//! A small blocking HTTP/1.1 client: one request a connection, so that a test decides when a connection breaks.
//!
//! Libraries hide what these tests are about: an answer that ends without its last chunk is an error here, never a
//! plain end.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// Longest silence of a server. Longer than every deadline within the deployment that these tests wait for.
const SILENCE_MAX: Duration = Duration::from_secs(60);
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// Longest line of a head or of a chunk's size.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Largest chunk that is believed.
const CHUNK_BYTES_MAX: usize = 64 << 20;

/// How the end of a body is known.
#[derive(Debug)]
enum Framing {
    /// So many bytes are left.
    Length(usize),
    /// Chunks; so many bytes are left of this one.
    Chunked { left: usize },
    /// The last byte has been read.
    Ended,
}

/// An answer whose head has been read.
pub struct Answering {
    /// HTTP status.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    framing: Framing,
}

/// A whole answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Response {
    /// HTTP status.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// All of it.
    pub body: String,
}

impl Response {
    /// The body as JSON.
    ///
    /// # Errors
    /// When it is none.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("no JSON: {:?}", self.body))
    }
}

/// A connection with its deadlines set.
///
/// # Errors
/// When nobody accepts.
pub fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, CONNECT_TIME_MAX)
        .with_context(|| format!("no connection to {address}"))?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The bytes of a POST.
pub fn post_bytes(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let n_bytes = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {n_bytes}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Sends a POST and reads the head of its answer.
///
/// # Errors
/// When the connection breaks or the answer is no HTTP.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Result<Answering> {
    let mut stream = connect(address)?;
    stream.write_all(&post_bytes(path, body))?;
    Answering::read(stream)
}

/// A whole GET.
///
/// # Errors
/// When the connection breaks or the answer is no HTTP.
pub fn get(address: SocketAddr, path: &str) -> Result<Response> {
    let mut stream = connect(address)?;
    let head = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    Answering::read(stream)?.whole()
}

impl Answering {
    /// Reads the head of an answer.
    ///
    /// # Errors
    /// When the connection breaks or the answer is no HTTP.
    pub fn read(stream: TcpStream) -> Result<Self> {
        let mut reader = BufReader::new(stream);
        let first = read_line(&mut reader)?;
        let status = first
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3)?.parse().ok())
            .with_context(|| format!("{first:?} is no status line"))?;
        let mut headers = Vec::new();
        loop {
            let line = read_line(&mut reader)?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').context("a header without a colon")?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let value = |name: &str| {
            let mut all = headers.iter();
            all.find_map(|(known, value)| (known == name).then_some(value.as_str()))
        };
        let framing = match (value("transfer-encoding"), value("content-length")) {
            (Some("chunked"), None) => Framing::Chunked { left: 0 },
            (None, Some(length)) => Framing::Length(length.parse().context("content-length")?),
            other => bail!("an answer without one way to find its end: {other:?}"),
        };
        Ok(Self {
            status,
            headers,
            reader,
            framing,
        })
    }

    /// The next bytes of the body; `None` after the last.
    ///
    /// # Errors
    /// When the connection ends before the body does.
    pub fn next_bytes(&mut self) -> Result<Option<Vec<u8>>> {
        if let Framing::Chunked { left: 0 } = self.framing {
            self.start_chunk()?;
        }
        let left = match self.framing {
            Framing::Ended | Framing::Length(0) => return Ok(None),
            Framing::Length(left) | Framing::Chunked { left } => left,
        };
        let mut bytes = vec![0; left.min(64 << 10)];
        let n_read = self.reader.read(&mut bytes)?;
        ensure!(n_read > 0, "the answer broke off");
        bytes.truncate(n_read);
        let left = left - n_read;
        if let Framing::Chunked { .. } = self.framing {
            if left == 0 {
                ensure!(read_line(&mut self.reader)?.is_empty(), "a chunk too long");
            }
            self.framing = Framing::Chunked { left };
        } else {
            self.framing = Framing::Length(left);
        }
        Ok(Some(bytes))
    }

    fn start_chunk(&mut self) -> Result<()> {
        let size = read_line(&mut self.reader)?;
        let left = usize::from_str_radix(&size, 16).with_context(|| format!("chunk {size:?}"))?;
        ensure!(left <= CHUNK_BYTES_MAX, "a chunk of {left} bytes");
        self.framing = Framing::Chunked { left };
        if left == 0 {
            ensure!(read_line(&mut self.reader)?.is_empty(), "trailers");
            self.framing = Framing::Ended;
        }
        Ok(())
    }

    /// The rest of the answer.
    ///
    /// # Errors
    /// When the connection ends before the body does.
    pub fn whole(mut self) -> Result<Response> {
        let mut body = Vec::new();
        while let Some(bytes) = self.next_bytes()? {
            body.extend(bytes);
        }
        Ok(Response {
            status: self.status,
            headers: self.headers,
            body: String::from_utf8(body).context("the body is no UTF-8")?,
        })
    }

    /// Leaves without reading on, as a client that goes away.
    pub fn leave(self) {
        // The peer may have closed first.
        let _ = self.reader.get_ref().shutdown(Shutdown::Both);
    }
}

fn read_line(reader: &mut BufReader<TcpStream>) -> Result<String> {
    let mut line = Vec::new();
    reader
        .by_ref()
        .take(LINE_BYTES_MAX)
        .read_until(b'\n', &mut line)?;
    ensure!(line.ends_with(b"\r\n"), "the answer broke off");
    line.truncate(line.len() - 2);
    String::from_utf8(line).context("a line that is no UTF-8")
}
