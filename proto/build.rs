//! Generates the message and service types from `pd/v1/*.proto`, without an installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=pd/v1");
    let files = protox::compile(["pd/v1/pd.proto"], ["."])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
