//! Sockets: clients that leave, headers without end, silence, drains, HTTP/2.

use crate::support::{Door, byte_answers, say};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemill_router::admission::Admission;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn connect(door: &Door) -> TcpStream {
    TcpStream::connect(door.address)
        .await
        .expect("the door is open")
}

fn request(path: &str, body: &Value) -> String {
    let body = body.to_string();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Reads until `wanted` has come.
async fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut read = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&read).into_owned();
        if text.contains(wanted) {
            return text;
        }
        let reading = tokio::time::timeout(Duration::from_secs(15), stream.read(&mut buffer));
        let n = reading.await.expect("in time").expect("readable");
        assert!(n > 0, "closed after {text:?}, before {wanted:?}");
        read.extend_from_slice(&buffer[..n]);
    }
}

#[tokio::test]
async fn b065_a_client_that_leaves_cancels_in_both_modes() {
    let door = Door::open(|job| byte_answers(job, b"first")).await;
    for (i, stream) in [true, false].into_iter().enumerate() {
        let mut connection = connect(&door).await;
        let body = json!({"prompt": "x", "stream": stream});
        let request = request("/v1/completions", &body);
        connection
            .write_all(request.as_bytes())
            .await
            .expect("written");
        if stream {
            read_until(&mut connection, "\"text\":\"t\"").await;
        } else {
            while door.n_jobs() <= i {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        assert_eq!(door.admission.n_taken(), 1);
        drop(connection);
        let left = Instant::now();
        door.all_ended().await;
        assert!(
            left.elapsed() < Duration::from_millis(500),
            "{:?}",
            left.elapsed()
        );
        assert_eq!(door.n_cancelled(), i + 1);
    }
}

#[tokio::test]
async fn b085_headers_are_bounded() {
    let door = Door::open(|job| say(job, "y")).await;
    let many = (0..200)
        .map(|i| format!("x-{i}: y\r\n"))
        .collect::<String>();
    let large = format!("x-large: {}\r\n", "y".repeat(80 << 10));
    for headers in [many, large] {
        let mut connection = connect(&door).await;
        let request = format!("GET /health HTTP/1.1\r\nhost: x\r\n{headers}\r\n");
        // The door may close while we still write.
        let _ = connection.write_all(request.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = connection.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
            "{answer}"
        );
    }
    assert_eq!(door.get("/health").await.status, 200);
}

#[tokio::test]
async fn b077_silent_and_dripping_connections_are_closed() {
    let door = Door::open(|job| say(job, "y")).await;
    let start = Instant::now();
    let cases: [&[u8]; 4] = [b"", b"P", b"PRI * HT", b"GET /health HTTP/1.1\r\nhost: "];
    let waits = cases.map(|bytes| {
        let address = door.address;
        tokio::spawn(async move {
            let mut connection = TcpStream::connect(address).await.expect("open");
            connection.write_all(bytes).await.expect("written");
            let mut rest = Vec::new();
            let _ = connection.read_to_end(&mut rest).await;
        })
    });
    for wait in waits {
        let left = Duration::from_secs(14).saturating_sub(start.elapsed());
        tokio::time::timeout(left, wait)
            .await
            .expect("closed in time")
            .expect("no panic");
    }
    assert!(
        start.elapsed() > Duration::from_secs(5),
        "not before its time"
    );
}

#[tokio::test]
async fn connections_from_one_address_are_bounded_and_counted_back() {
    let admission = Arc::new(Admission::new(4, 0));
    let change = |config: &mut tidemill_router::http::HttpConfig| {
        config.connections.connections_per_address_max = 2;
    };
    let door = Door::open_with(admission, change, |job| say(job, "y")).await;
    let get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    let (mut first, mut second) = (connect(&door).await, connect(&door).await);
    for connection in [&mut first, &mut second] {
        connection.write_all(get).await.expect("written");
        read_until(connection, "ok").await;
    }
    let mut third = connect(&door).await;
    let _ = third.write_all(get).await;
    let mut answer = Vec::new();
    let _ = third.read_to_end(&mut answer).await;
    assert!(answer.is_empty(), "refused without an answer");
    drop(first);
    for _ in 0..200 {
        let mut again = connect(&door).await;
        let _ = again.write_all(get).await;
        let mut answer = [0; 16];
        if matches!(again.read(&mut answer).await, Ok(n) if n > 0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the place of the closed connection never came back");
}

#[tokio::test]
async fn b092_a_drain_lets_open_requests_end() {
    let door = Door::open(|job| byte_answers(job, b"first")).await;
    let mut connection = connect(&door).await;
    let body = json!({"prompt": "x", "stream": true});
    let request = request("/v1/completions", &body);
    connection
        .write_all(request.as_bytes())
        .await
        .expect("written");
    read_until(&mut connection, "\"text\":\"t\"").await;
    door.shutdown.cancel();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(
        TcpStream::connect(door.address).await.is_err(),
        "no new connections"
    );
    assert!(!door.served.is_finished(), "the open stream is waited for");
    drop(connection);
    let served = tokio::time::timeout(Duration::from_secs(5), door.served).await;
    served.expect("drained").expect("no panic").expect("served");
}

#[tokio::test]
async fn an_idle_door_drains_at_once() {
    let door = Door::open(|job| say(job, "y")).await;
    assert_eq!(door.get("/health").await.status, 200);
    let _silent = connect(&door).await;
    door.shutdown.cancel();
    let served = tokio::time::timeout(Duration::from_secs(5), door.served).await;
    served.expect("drained").expect("no panic").expect("served");
}

#[tokio::test]
async fn http2_is_spoken_too() {
    let door = Door::open(|job| say(job, "hello")).await;
    let client = Client::builder(TokioExecutor::new())
        .http2_only(true)
        .build_http();
    let request = hyper::Request::post(format!("http://{}/v1/completions", door.address))
        .header("content-type", "application/json")
        .body(Full::<Bytes>::from(
            json!({"prompt": "x", "stream": true}).to_string(),
        ))
        .expect("a request");
    let response = client.request(request).await.expect("an answer");
    assert_eq!(response.version(), hyper::Version::HTTP_2);
    let body = response
        .into_body()
        .collect()
        .await
        .expect("whole")
        .to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
}

#[tokio::test]
async fn b100_a_reset_http2_stream_cancels_its_request() {
    let door = Door::open(|job| byte_answers(job, b"first")).await;
    let client = Client::builder(TokioExecutor::new())
        .http2_only(true)
        .build_http();
    let request = hyper::Request::post(format!("http://{}/v1/completions", door.address))
        .header("content-type", "application/json")
        .body(Full::<Bytes>::from(
            json!({"prompt": "x", "stream": true}).to_string(),
        ))
        .expect("a request");
    let mut response = client.request(request).await.expect("an answer");
    response
        .frame()
        .await
        .expect("a first event")
        .expect("good");
    drop(response);
    door.all_ended().await;
    assert_eq!(door.n_cancelled(), 1);
}

/// Sends a head that promises `promised` bytes, then `rest`; gives all that comes back until the door closes.
async fn ask_with_length(door: &Door, promised: &str, rest: &str) -> String {
    let mut connection = connect(door).await;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {promised}\r\n\r\n{rest}"
    );
    let written = connection.write_all(request.as_bytes()).await;
    written.expect("written");
    let mut answer = Vec::new();
    let reading = connection.read_to_end(&mut answer);
    let read = tokio::time::timeout(Duration::from_secs(15), reading).await;
    let _ = read.expect("the door closes in time");
    String::from_utf8_lossy(&answer).into_owned()
}

fn hasty(config: &mut tidemill_router::http::HttpConfig) {
    config.connections.header_time_max = Duration::from_millis(300);
}

#[tokio::test]
async fn b109_a_content_length_that_lies_is_no_request() {
    let admission = Arc::new(Admission::new(4, 0));
    let door = Door::open_with(admission, hasty, |job| say(job, "y")).await;
    let body = json!({"prompt": "x"}).to_string();
    let n_bytes = body.len();
    let honest = ask_with_length(&door, &n_bytes.to_string(), &body).await;
    assert!(honest.starts_with("HTTP/1.1 200"), "{honest}");
    assert_eq!(door.n_jobs(), 1);
    // Shorter: what is left over is no request of its own.
    let next = format!("{body}GET /health HTTP/1.1\r\nhost: x\r\n\r\n");
    let short = ask_with_length(&door, &(n_bytes - 1).to_string(), &next).await;
    assert!(short.starts_with("HTTP/1.1 400"), "{short}");
    assert!(short.contains("invalid_json"), "{short}");
    assert!(!short.contains("HTTP/1.1 200"), "{short}");
    // Two lengths, and what is no length.
    for bad in [
        "13\r\ncontent-length: 14",
        "13, 14",
        "-1",
        "0x10",
        "+13",
        "",
    ] {
        let answer = ask_with_length(&door, bad, &body).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{bad:?}: {answer}");
    }
    // Longer: the rest is waited for, but not for ever.
    let long = ask_with_length(&door, &(n_bytes + 10).to_string(), &body).await;
    assert!(long.starts_with("HTTP/1.1 408"), "{long}");
    assert!(long.contains("body_timeout"), "{long}");
    assert_eq!(door.n_jobs(), 1, "none of them was served");
}

#[tokio::test]
async fn b109_a_body_that_breaks_off_is_no_request() {
    let door = Door::open(|job| say(job, "y")).await;
    let body = json!({"prompt": "x"}).to_string();
    let request = request("/v1/completions", &json!({"prompt": "xx"}));
    let cut = request.rfind(&body[..5]).expect("the body's start") + body.len();
    let mut connection = connect(&door).await;
    let written = connection.write_all(&request.as_bytes()[..cut]).await;
    written.expect("written");
    drop(connection);
    door.all_ended().await;
    assert_eq!(door.complete("x", json!({})).await.status, 200);
    assert_eq!(door.n_jobs(), 1);
}

#[tokio::test]
async fn b109_a_length_beside_chunks_hides_no_second_request() {
    let admission = Arc::new(Admission::new(4, 0));
    let door = Door::open_with(admission, hasty, |job| say(job, "y")).await;
    // Whoever believes the length takes this for a body, whoever believes the chunks for a second request.
    let hidden = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    let chunked = format!("0\r\n\r\n{hidden}");
    let promised = format!("{}\r\ntransfer-encoding: chunked", chunked.len());
    let answer = ask_with_length(&door, &promised, &chunked).await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(!answer.contains("HTTP/1.1 200"), "{answer}");
}
