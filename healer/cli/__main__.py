from healer.cli import main

main()
