//! Internal ports carry prompts and KV without credentials until TLS is configured, so a process refuses to
//! bind them beyond loopback unless its operator spells out `--insecure-network`.

use std::net::SocketAddr;

/// The refusal, with what to do next.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{flag} is {address}, which is reachable from other machines, and this port has no credentials; \
     use a loopback address, or add --insecure-network if the network is isolated"
)]
pub struct OpenBind {
    /// The flag that holds the address.
    pub flag: &'static str,
    /// The address.
    pub address: SocketAddr,
}

/// Allows loopback addresses, and any address when `insecure_network` was spelled out.
///
/// # Errors
/// [`OpenBind`] for an address that other machines reach.
pub fn check(
    flag: &'static str,
    address: SocketAddr,
    insecure_network: bool,
) -> Result<(), OpenBind> {
    if address.ip().is_loopback() || insecure_network {
        return Ok(());
    }
    Err(OpenBind { flag, address })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_binds_by_default() {
        for open in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
            let address: SocketAddr = open.parse().expect("an address");
            assert!(check("--listen", address, false).is_err(), "{open}");
            assert!(check("--listen", address, true).is_ok(), "{open}");
        }
        for private in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1"] {
            let address: SocketAddr = private.parse().expect("an address");
            assert!(check("--listen", address, false).is_ok(), "{private}");
        }
    }
}
