from zerofit.cli import main

main()
