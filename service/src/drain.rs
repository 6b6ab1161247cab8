//! The orderly end. SIGTERM or SIGINT begins a drain; a second one ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by the first SIGTERM or SIGINT. The second exits with status 130.
///
/// # Errors
/// When the operating system refuses the handlers.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let drain = token.clone();
    tokio::spawn(async move {
        for is_second in [false, true] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if is_second {
                std::process::exit(130);
            }
            tracing::info!("draining: no new work; send the signal again to end at once");
            drain.cancel();
        }
    });
    Ok(token)
}
